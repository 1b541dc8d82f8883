"""Saves and loads a training run's checkpoints.

Every rank lists its pieces of the state. They are joined on rank 0, which writes them while all ranks wait
for the result, so a full disk stops all ranks with the same message. Rank 0 reads a checkpoint and sends
each tensor to the others, so only rank 0 needs to see the files. For sharded checkpoints see `write.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import check_identity, describe_identity, open_usable
from paceline.checkpoint.content import read_all
from paceline.checkpoint.folder_names import CHECKPOINTS
from paceline.checkpoint.part import Part
from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.generators import read_generators, write_generators
from paceline.parallel.placement import local
from paceline.recipe.layout import Layout
from paceline.train.islands import Islands
from paceline.train.same_settings import all_ranks
from paceline.train.settings import Settings, name_settings
from paceline.train.state.grace import Grace
from paceline.train.state.kept_settings import KeptSettings
from paceline.train.state.parts import KnownPlans, Names, Parts, model_tensors
from paceline.train.state.residuals import (
    NeededResiduals,
    choose_residuals,
    gather_residuals,
)
from paceline.train.state.run_start import RunStart
from paceline.train.state.same_model import check_model, check_optimizers
from paceline.train.state.saving import SaveHandle, Saving
from paceline.train.state.tracked import Tracked, state_differs_error
from paceline.train.state.transfer import load_on_main, run_on_main
from paceline.train.state.write import RunState
from paceline.train.step import SaveTimes
from paceline.train.update import Update
from paceline.world import World

log = logging.getLogger(__name__)


class Saver:
    """The saving and loading of a trainer's state.

    Args:
        models: by name.
        updates: by the name of the model.
        loaders: by name; a loader made later is added to the same mapping.
        keep: checkpoints to keep.
        saving: makes the saves.
        layout: resolved.
        recipe_toml: the recipe to put beside the state.
        settings: those that the run's result depends on, see `settings.py`.
        islands: of the run, if any.

    Attributes:
        saving: makes the saves.
        tracked: objects and positions of loaders that are part of the checkpoints.
    """

    def __init__(
        self,
        world: World,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        loaders: Mapping[str, Loader],
        *,
        keep: int,
        saving: Saving,
        layout: Layout,
        reduction: str,
        recipe_toml: str | None,
        settings: Settings,
        islands: Islands | None = None,
    ) -> None:
        self._islands = islands
        self._world = world
        self._models, self._updates, self._loaders = models, updates, loaders
        self._keep = keep
        self.saving = saving
        self._layout = layout
        self._reduction = reduction
        self._recipe_toml = recipe_toml
        self._known = KnownPlans()
        self.tracked = Tracked()
        self._settings = KeptSettings(settings, loaders, self.tracked, is_recipe=recipe_toml is not None)
        self._last: SaveHandle | None = None
        self._start: RunStart | None = None
        self._grace = Grace(is_main=world.is_main)
        self._is_ready = True

    @property
    def folder(self) -> Path | None:
        """Folder of the run; `None` before `load`."""
        return None if self._start is None else self._start.folder

    @property
    def has_raw_batches(self) -> bool:
        """Whether some batches came from no loader, so that the trainer's own microbatch size counts."""
        return self._settings.has_raw_batches

    @has_raw_batches.setter
    def has_raw_batches(self, value: bool) -> None:
        self._settings.has_raw_batches = value

    def save(self, counters: dict[str, Any], *, wait: bool, is_last: bool = False) -> SaveHandle:
        """Write a checkpoint of `counters["step"]`; collective. See `Trainer.save`."""
        last = self._last
        if last is None or last.step != counters["step"] or last.failed:
            if self._start is None:
                raise _no_folder_error()
            self._check_tracked(is_last=is_last)
            last = self._last = self._save(self._start, counters)
        if wait:
            last.wait()
        return last

    def _check_tracked(self, *, is_last: bool = False) -> None:
        """Raise PL395 if tracked objects differ between ranks; only log it for a last save; collective."""
        if self._world.world_size == 1 or self.tracked.is_empty:
            return
        if differing := self.tracked.check_same(self._parts(), all_ranks()):
            error = state_differs_error(differing)
            if not is_last:
                raise error
            log.warning("%s", error)

    def _save(self, start: RunStart, counters: dict[str, Any]) -> SaveHandle:
        folder = start.begin_save(counters["best"] and counters["best"][0])
        gathered: dict[str, Any] = {"residuals": gather_residuals(self._updates)}
        if self._islands is not None:
            gathered["islands"] = self._islands.state_dict()

        def describe() -> dict[str, Any]:
            return self._describe_state(counters) | {"tracked": self.tracked.loaded} | gathered

        state = self._list_state(describe)
        with nullcontext() if self._islands is None else self._islands.whole():
            return self.saving.save(
                folder, counters["step"], state, self._describe(start), start.history.note_commit
            )

    def end_step(self) -> SaveTimes:
        """Wait until the state of the step before is copied; after the first step, get memory ready.

        Returns:
            The result of `Saving.take_times`.
        """
        if self.folder is not None:
            self.saving.end_step()
            if not self._is_ready and self._islands is None:  # an optimizer has all of its state only now
                self._is_ready = True
                self.saving.get_ready(lambda: self._list_state(lambda: {"tracked": {}}))
        times = self.saving.take_times()
        self._grace.check(times.save_s)
        return times

    def _list_state(self, describe: Callable[[], dict[str, Any]]) -> RunState:
        parts = self._parts()
        optimizers = {name: update.optimizer_pieces() for name, update in self._updates.items()}
        reads = self._world.is_main or parts.is_divided  # elsewhere it would only cost memory
        tracked = self.tracked.read(parts) if reads else {}
        copies = [update.copies for update in self._updates.values()]
        return RunState(parts, optimizers, tracked, describe, self._recipe_toml, copies)

    def load(self, folder: Path, accept: Sequence[str]) -> dict[str, Any] | None:
        """Load the newest valid checkpoint into models and updates; collective. See `Trainer.resume`.

        Returns:
            The saved counters, or `None` if there is no checkpoint.
        """
        self.saving.start()
        self._start, self._last, self._is_ready = None, None, False
        self._start = start = RunStart(
            self._world, folder, keep=self._keep, is_sharded=self.saving.is_sharded
        )
        self._settings.accept, self._settings.folder = tuple(accept), folder
        parts = self._parts()
        needed = NeededResiduals(self._updates, self._world.rank, self._world.world_size)

        def read() -> Any:
            start.open()
            if start.newest is None:
                return None
            loaded = open_usable(start.newest)
            start.adopt(loaded.identity)
            for finding in check_identity(loaded.identity, self._describe(start)):
                log.warning("%s", finding)
            # Checked here, where tensors are whole: a rank cannot distinguish a part from a whole tensor of a
            # smaller model.
            check_optimizers(set(self._updates), set(loaded.optimizer))
            check_model(parts.whole_shapes(), loaded.model)
            # Unread, because other ranks need most of them.
            residuals = choose_residuals(loaded.state.pop("residuals", {}), self._updates)
            state = read_all(loaded.state)
            changed = self._settings.compare(state["settings"])
            return {
                "model": loaded.model,
                "optimizer": loaded.optimizer,
                "state": state,
                "changed": changed,
                "residuals": residuals,
            }

        def find_part(names: Names, shape: tuple[int, ...]) -> Part | None:
            return needed.find_part(names, shape) or parts.find_part(names, shape)

        def cut(names: Names, whole: Tensor) -> Tensor:
            is_needed = needed.needs(names) and (self._islands is None or self._islands.needs(names))
            return parts.cut(names, whole) if is_needed else torch.empty(0)

        tree = load_on_main(self._world, read, cut, find_part, folder / CHECKPOINTS)
        if tree is None:
            return None
        _load_models(self._models, tree["model"], parts)
        state = tree["state"]
        counters: dict[str, Any] = state["counters"]
        self._settings.load(state["settings"])
        for name, update in self._updates.items():
            prefix = name_settings(name, self._updates, "")
            changed = [key.removeprefix(prefix) for key in tree["changed"] if key.startswith(prefix)]
            update.load(
                tree["optimizer"][name], state["updates"][name], step=counters["step"], changed=changed
            )
        if self._islands is not None:
            self._islands.load(state.get("islands", {}))
        needed.load(tree["residuals"], self._world.device)
        write_generators(state["rng"], self._world.device)
        self.tracked.load(state, parts)
        return counters

    def close(self) -> None:
        """Wait for writers to finish."""
        self.saving.close()

    def check_loader(self, loader: Loader) -> None:
        """Compare a loader made after `load` with the saved one whose position it gets; collective."""
        if self._settings.were_loaded:
            run_on_main(self._world, lambda: self._settings.check_loader(loader))

    def check_complete(self) -> None:
        """Begin this start; raise PL515 if a saved state has no owner; before each step; collective."""
        if self._start is not None:
            self._start.begin()
        self._settings.check_complete(is_main=self._world.is_main)

    def _describe_state(self, counters: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's state of the run, without the tensors and tracked objects."""
        # A loader that has not moved, such as one for evaluation, has no position to save.
        moved = {name: loader for name, loader in self._loaders.items() if loader.has_moved}
        return {
            "loss": counters["loss"],  # `paceline checkpoint show` prints it
            "counters": counters,
            "updates": {name: update.state_dict() for name, update in self._updates.items()},
            "loaders": self.tracked.read_loaders(moved),
            "settings": self._settings.describe(moved),
            "rng": read_generators(self._world.device),
        }

    def _parts(self) -> Parts:
        return Parts(self._models, self._updates, self._layout, self._world.rank, self._known)

    def _describe(self, start: RunStart) -> dict[str, Any]:
        """Return the identity of a start's checkpoints; rank 0's counts."""
        identity = describe_identity(
            self._world.device,
            world_size=self._world.world_size,
            layout=str(self._layout),
            reduction=self._reduction,
        )
        return identity | {"run": start.run_id, "generation": start.generation}


def _load_models(models: Mapping[str, nn.Module], tensors: Mapping[str, Any], parts: Parts) -> None:
    """Copy this rank's parts of the tensors into the models."""
    with torch.no_grad():
        for name, tensor in model_tensors(models).items():
            if not parts.holds(name):
                continue
            local(tensor).copy_(tensors[name])


def _no_folder_error() -> PacelineError:
    return PacelineError(
        "PL403",
        saw="save() before resume().",
        rule="Checkpoints go into the run's folder.",
        fix='Call trainer.resume("runs/demo") first; an empty or missing folder starts a new run.',
    )
