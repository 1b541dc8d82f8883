"""What a checkpoint of a training run holds, and how it gets there and back.

Written by rank 0; every rank waits for the outcome, so a disk that is full stops all ranks with the
same message. Read by rank 0 and sent to the others, so only rank 0 needs to see the files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from paceline.checkpoint import CheckpointFolder, check_identity, describe_identity
from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.parallel.placement import Placement, local
from paceline.train.belongings import EVALUATIONS, METRICS, OpenFolder, check_belongings
from paceline.train.history import History
from paceline.train.hook_saving import Saved, check_hooks, gather_hooks, restore_hooks
from paceline.train.rng import read_generators, write_generators
from paceline.train.settings import (
    Settings,
    check_names,
    describe_loader,
    list_changes,
    name_settings,
    refuse_changes,
    tell_fresh_objects,
    tell_unknown_settings,
)
from paceline.train.transfer import load_on_main, run_on_main
from paceline.train.update import Update
from paceline.world import World

log = logging.getLogger(__name__)


class Saver:
    """Saves and loads all state of a trainer.

    Args:
        world: the ranks.
        keep: checkpoints to keep.
        layout: as text, for the checkpoint's identity.
        reduction: the same.
        recipe_toml: the recipe to put beside the state.
        settings: what the run's result depends on, see `settings.py`.
        bucket_cap_mb: of DistributedDataParallel.

    Attributes:
        folder: of the run, once `load` was given it.
        has_raw_batches: whether batches came from elsewhere than a loader, so that the trainer's own
            microbatch size counts.
    """

    def __init__(
        self,
        world: World,
        *,
        keep: int,
        layout: str,
        reduction: str,
        recipe_toml: str | None,
        settings: Settings,
        bucket_cap_mb: float,
    ) -> None:
        self.folder: Path | None = None
        self._open_folder: OpenFolder | None = None
        self._world = world
        self._keep = keep
        self._layout = layout
        self._reduction = reduction
        self._recipe_toml = recipe_toml
        self._settings = settings
        self._bucket_cap_mb = bucket_cap_mb
        self.has_raw_batches = False
        self._saved_settings: dict[str, Any] | None = None
        self._accept: tuple[str, ...] = ()
        self._is_complete = True
        self._tracked: dict[str, Any] = {}
        self._loaded_tracked: dict[str, Any] = {}
        self._loaded_loaders: dict[str, Any] = {}
        self._last: tuple[int, Path] | None = None
        self._history: History | None = None
        self._parts: _Parts | None = None

    @property
    def tracked(self) -> list[str]:
        """Names of the objects that join the checkpoints."""
        return sorted(self._tracked)

    def track(self, objects: Mapping[str, Any]) -> None:
        """Adds objects with state; gives them what was loaded for them."""
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise PacelineError(
                    "PL408",
                    saw=f"track({name}={type(value).__name__}).",
                    rule="A tracked object has state_dict() and load_state_dict(state).",
                    fix="Add the two methods, or keep that value elsewhere.",
                )
            self._tracked[name] = value
            if name in self._loaded_tracked:
                self._give(value, self._loaded_tracked.pop(name))

    def take_loader_state(self, name: str) -> dict[str, Any] | None:
        """The loaded position of a loader, once."""
        state: dict[str, Any] | None = self._loaded_loaders.pop(name, None)
        return state

    def save(
        self,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        counters: dict[str, Any],
        loaders: Mapping[str, Loader],
    ) -> Path:
        """Writes a checkpoint of `counters["step"]`; collective. See `Trainer.save`."""
        step = counters["step"]
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        folder = self._require_folder()
        # Together, while all ranks are here; only rank 0 keeps what comes of it.
        tensors = _gather_models(models, updates, keep=self._world.is_main)
        optimizers = {
            name: update.optimizer_state(keep=self._world.is_main) for name, update in updates.items()
        }
        hooks = gather_hooks(updates, self._bucket_cap_mb)
        parts = _Parts(models, updates)
        tracked: dict[str, Any] = {}
        if self._world.is_main or parts.is_divided:
            tracked = {name: parts.join(value.state_dict()) for name, value in self._tracked.items()}

        def write() -> Path:
            assert self._open_folder is not None
            self._open_folder.check()
            state = {
                "loss": counters["loss"],  # `paceline checkpoint show` tells it
                "counters": counters,
                "updates": {name: update.state_dict() for name, update in updates.items()},
                "loaders": self._loaded_loaders
                | {name: loader.state_dict() for name, loader in loaders.items()},
                "settings": self._describe_settings(loaders),
                "hooks": hooks,
                "rng": read_generators(self._world.device),
                "tracked": tracked | self._loaded_tracked,
            }
            return folder.save(
                step,
                model=tensors,
                optimizer=optimizers,
                state=state,
                recipe_toml=self._recipe_toml,
                identity=self._describe(),
            )

        path = run_on_main(self._world, write)
        self._last = (step, path)
        assert self._history is not None
        self._history.note_commit(step)
        return path

    def load(
        self,
        folder: Path,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        loaders: Mapping[str, Loader],
        accept: Sequence[str],
    ) -> dict[str, Any] | None:
        """Reads the newest valid checkpoint into models and updates; collective. See `Trainer.resume`.

        Returns:
            The counters that were saved, or `None` where there is no checkpoint.
        """
        self.folder, self._last = folder, None
        self._history = History(self._world, folder)
        self._history.check()
        self._accept = tuple(accept)
        hooks: Saved = {}

        def read() -> Any:
            _make_folder(folder)
            self._open_folder = OpenFolder(folder)
            loaded = CheckpointFolder(folder, keep=self._keep).load_newest(on_skip=_warn_of_skip)
            if loaded is None:
                return None
            for finding in check_identity(loaded.identity, self._describe()):
                log.warning("%s", finding)
            # Here, where tensors are whole: a rank can't tell a part from a whole tensor of a smaller model.
            _check_optimizers(set(updates), set(loaded.optimizer))
            _check_model(_whole_shapes(models, updates), loaded.model)
            changed = self._check_settings(loaded.state, loaders)
            hooks.update(loaded.state.pop("hooks", {}))  # of each rank its own, see below
            if "comm_hook" in accept:
                hooks.clear()
            check_hooks(hooks, self._world.world_size, self._bucket_cap_mb)
            return {
                "model": loaded.model,
                "optimizer": loaded.optimizer,
                "state": loaded.state,
                "changed": changed,
                "hooks": list(hooks),
            }

        self._parts = _Parts(models, updates)
        tree = load_on_main(self._world, read, self._parts.cut)
        if tree is None:
            return None
        _load_models(models, tree["model"])
        state = tree["state"]
        counters: dict[str, Any] = state["counters"]
        self._saved_settings, self._is_complete = state.get("settings"), False
        for name, update in updates.items():
            prefix = name_settings(name, updates, "")
            changed = [key.removeprefix(prefix) for key in tree["changed"] if key.startswith(prefix)]
            update.load(
                tree["optimizer"][name], state["updates"][name], step=counters["step"], changed=changed
            )
        restore_hooks(hooks, updates, tree["hooks"], self._world.device)
        write_generators(state["rng"], self._world.device)
        self._loaded_loaders = dict(state["loaders"])
        self._loaded_tracked = dict(state["tracked"])
        for name, value in self._tracked.items():
            if name in self._loaded_tracked:
                self._give(value, self._loaded_tracked.pop(name))
        return counters

    def check_loader(self, loader: Loader) -> None:
        """Compares a loader made after `load` with the one whose position it takes over; collective."""
        if self._saved_settings is None:
            return
        saved = self._saved_settings["loaders"].get(loader.name, {})

        def check() -> None:
            changes = list_changes(saved, describe_loader(loader), {loader.name: loader})
            refuse_changes(changes, self._accept, self.folder, is_recipe=self._recipe_toml is not None)

        run_on_main(self._world, check)

    def check_complete(self) -> None:
        """Before the first step after `load`: raises where something that was saved has found no owner."""
        if self._is_complete:
            return
        self._is_complete = True
        missing = [f"tracked.{name}" for name in self._loaded_tracked]
        missing += [f"loaders.{name}" for name in self._loaded_loaders]
        refuse_changes(
            dict.fromkeys(missing, (None, None)),
            self._accept,
            self.folder,
            is_recipe=self._recipe_toml is not None,
        )
        self._loaded_tracked.clear()
        self._loaded_loaders.clear()
        if self._saved_settings is not None and self._world.is_main:
            fresh = [name for name in self._tracked if name not in self._saved_settings["tracked"]]
            if fresh:
                tell_fresh_objects(fresh)

    def _check_settings(self, state: dict[str, Any], loaders: Mapping[str, Loader]) -> list[str]:
        """The names of settings that differ from the checkpoint's, all of them accepted by the user."""
        saved = state.get("settings")
        if saved is None:
            tell_unknown_settings()
            return []
        self.has_raw_batches = "microbatch_size" in saved["run"]
        moved = {name: loaders[name] for name in saved["loaders"] if name in loaders}
        here = self._describe_settings(moved)
        before, now = dict(saved["run"]), dict(here["run"])
        for name in moved:
            before |= saved["loaders"][name]
            now |= here["loaders"][name]
        later = [key for name, keys in saved["loaders"].items() if name not in moved for key in keys]
        parts = [f"tracked.{name}" for name in saved["tracked"]]
        parts += [f"loaders.{name}" for name in saved["loaders"]]
        check_names(self._accept, {*before, *now, *later, *parts})
        return refuse_changes(
            list_changes(before, now, moved),
            self._accept,
            self.folder,
            is_recipe=self._recipe_toml is not None,
        )

    def _describe_settings(self, loaders: Mapping[str, Loader]) -> dict[str, Any]:
        run = dict(self._settings)
        if not self.has_raw_batches:
            del run["microbatch_size"]
        described = {name: describe_loader(loader) for name, loader in loaders.items()}
        if self._saved_settings is not None:  # of loaders that are not made yet
            described = {
                name: self._saved_settings["loaders"].get(name, {}) for name in self._loaded_loaders
            } | described
        return {"run": run, "loaders": described, "tracked": sorted({*self._tracked, *self._loaded_tracked})}

    def _give(self, value: Any, state: Any) -> None:
        """Loads a tracked object's state, of which it gets this rank's parts where it has parts now."""
        if self._parts is not None and self._parts.is_divided:
            state = self._parts.cut_as(state, value.state_dict())
        value.load_state_dict(state)

    def _describe(self) -> dict[str, Any]:
        return describe_identity(
            self._world.device,
            world_size=self._world.world_size,
            layout=self._layout,
            reduction=self._reduction,
        )

    def _require_folder(self) -> CheckpointFolder:
        if self.folder is None:
            raise PacelineError(
                "PL403",
                saw="save() before resume().",
                rule="Checkpoints go into the run's folder.",
                fix='Call trainer.resume("runs/demo") first; with nothing there it starts fresh.',
            )
        return CheckpointFolder(self.folder, keep=self._keep)


def _model_tensors(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Full names: as in the module for one model, `name.` before them for several."""
    if len(models) == 1:
        return next(iter(models.values())).state_dict()
    return {f"{name}.{key}": t for name, model in models.items() for key, t in model.state_dict().items()}


def _gather_models(
    models: Mapping[str, nn.Module], updates: Mapping[str, Update], *, keep: bool
) -> dict[str, Any]:
    """The same, of whole tensors; collective. Tied names give one tensor, as they do in the model."""
    placement = _find_placement(models, updates)
    if placement is None:
        return _model_tensors(models) if keep else {}
    made: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for name, tensor in next(iter(models.values())).state_dict(keep_vars=True).items():
        if id(tensor) not in made:
            whole = placement.whole(name, tensor.detach())
            made[id(tensor)] = whole.cpu() if keep else None
        found[name] = made[id(tensor)]
    return found if keep else {}


def _find_placement(models: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> Placement | None:
    """Where the parts of the only model are, if it is divided; several models never are."""
    if len(models) > 1 or not updates:
        return None
    placement = next(iter(updates.values())).placement
    return placement if placement.is_divided else None


class _Parts:
    """What this rank keeps of a checkpoint's whole tensors, by the names that lead to them."""

    def __init__(self, models: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> None:
        self._placement = _find_placement(models, updates)
        self._tensors: dict[str, Any] = {}
        if self._placement is not None:
            self._tensors = next(iter(models.values())).state_dict(keep_vars=True)

    @property
    def is_divided(self) -> bool:
        """Whether this rank lacks a part of the model."""
        return self._placement is not None

    def join(self, state: Any) -> Any:
        """A tracked object's state with whole tensors; collective. What is named like a parameter (an average
        of weights) and is as large as this rank's part of it, is such a part."""

        def gather(path: Any, value: Any) -> Any:
            name = self._find_name(path)
            if name is None or self._placement is None or not self._is_part(name, value):
                return value
            return self._placement.whole(name, value).cpu()

        return tree_map_with_path(gather, state)

    def cut_as(self, state: Any, current: Any) -> Any:
        """The rank's parts of a tracked object's whole state, where it has parts of these at present."""
        held = {str(path): value for path, value in tree_flatten_with_path(current)[0]}

        def cut(path: Any, value: Any) -> Any:
            name, now = self._find_name(path), held.get(str(path))
            if name is None or self._placement is None or not self._is_part(name, now):
                return value
            if not self._placement.divides(name, self._tensors[name], value):
                return value
            part = self._placement.part(name, value, self._tensors[name]).clone()
            return _lie_as(part, now) if isinstance(now, DTensor) else part

        return tree_map_with_path(cut, state)

    def _find_name(self, path: Any) -> str | None:
        """The tensor of the model that a key is named after, whatever stands before its full name."""
        key = getattr(path[-1], "key", None) if path else None
        while isinstance(key, str) and key:
            if key in self._tensors:
                return key
            key = key.partition(".")[2]
        return None

    def _is_part(self, name: str, value: Any) -> bool:
        assert self._placement is not None
        of_model = self._tensors[name]
        if not isinstance(value, torch.Tensor) or value.shape != of_model.shape:
            return False
        return isinstance(value, DTensor) or (name in self._placement.splits and not _is_sharded(of_model))

    def cut(self, path: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of a parameter, buffer or piece of optimizer state; anything else as it is."""
        if self._placement is None or len(path) < 2:
            return whole
        name = (
            path[1] if path[0] == "model" else path[3] if path[0] == "optimizer" and len(path) > 3 else None
        )
        tensor = self._tensors.get(name) if isinstance(name, str) else None
        if tensor is None or not self._placement.divides(str(name), tensor, whole):
            return whole
        return self._placement.part(str(name), whole, tensor).clone()


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _lie_as(part: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _check_optimizers(here: set[str], saved: set[str]) -> None:
    if here != saved:
        raise PacelineError(
            "PL511",
            saw=f"the checkpoint has optimizer state for {', '.join(sorted(saved))}; here "
            f"{', '.join(sorted(here))} have an optimizer.",
            rule="A run goes on with the optimizers it began with.",
            fix="Choose another run folder, or give the same models an optimizer.",
        )


def _whole_shapes(
    models: Mapping[str, nn.Module], updates: Mapping[str, Update]
) -> dict[str, tuple[int, ...]]:
    """By full name, the shapes of the models' whole tensors."""
    placement = _find_placement(models, updates)
    return {
        name: tuple(tensor.shape if placement is None else placement.whole_shape(name, tensor))
        for name, tensor in _model_tensors(models).items()
    }


def _check_model(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """Raises PL531 for tensors of another model.

    Args:
        expected: shapes of the models' whole tensors by full name.
        tensors: of a checkpoint, whole.
    """
    problems = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    problems += [f"{name} is not in this model" for name in tensors.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} there and {expected[name]} here"
        for name in expected.keys() & tensors.keys()
        if tuple(tensors[name].shape) != expected[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (" ..." if len(problems) > 5 else "")
        raise PacelineError(
            "PL531",
            saw=f"the checkpoint is of another model: {shown}.",
            rule="A run goes on with the model it began with.",
            fix="Choose another run folder, or build the model as it was.",
        )


def _load_models(models: Mapping[str, nn.Module], tensors: Mapping[str, Any]) -> None:
    """Copies what this rank keeps into the models."""
    with torch.no_grad():
        for name, tensor in _model_tensors(models).items():
            local(tensor).copy_(tensors[name])


def _make_folder(folder: Path) -> None:
    check_belongings(folder, (METRICS, EVALUATIONS))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PacelineError(
            "PL532",
            saw=f"{folder} can't be written to: {error.strerror}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder, or change its permissions.",
        ) from None


def _warn_of_skip(path: Path, findings: list[Finding]) -> None:
    for finding in findings:
        log.warning("%s", finding)
    log.warning("%s is left out; trying the one before it", path)
