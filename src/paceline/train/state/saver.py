"""Saves and loads a training run's checkpoints.

Every rank lists its pieces of the state. They are joined on rank 0, which writes them while all ranks wait
for the result, so a full disk stops all ranks with the same message. Rank 0 reads a checkpoint and sends
each tensor to the others, so only rank 0 needs to see the files. For sharded checkpoints see `write.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import CheckpointFolder, check_identity, describe_identity, open_usable
from paceline.checkpoint.content.protocol import read_all
from paceline.checkpoint.generation import begin_generation, newest_generation
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.names import CHECKPOINTS, SHARDED, list_checkpoints
from paceline.checkpoint.part import Part
from paceline.checkpoint.writing.waiting import await_writers
from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.generators import read_generators, write_generators
from paceline.parallel.placement import local
from paceline.recipe.layout import Layout
from paceline.train.belongings import EVALUATIONS, METRICS, OpenFolder, check_belongings
from paceline.train.same_settings import all_ranks
from paceline.train.settings import (
    Settings,
    check_names,
    describe_loader,
    list_changes,
    name_settings,
    refuse_changes,
    warn_fresh_objects,
    warn_unknown_settings,
)
from paceline.train.state.apart import (
    count_copies,
    find_apart,
    warn_of_single_copies,
    write_apart,
)
from paceline.train.state.disks import Disks, find_disks
from paceline.train.state.failures import Failures
from paceline.train.state.follow import SharedRows
from paceline.train.state.grace import Grace
from paceline.train.state.history import History
from paceline.train.state.hooks import Saved, check_hooks, gather_hooks, restore_hooks
from paceline.train.state.parts import KnownPlans, Names, Parts, model_tensors
from paceline.train.state.residuals import (
    NeededResiduals,
    choose_residuals,
    gather_residuals,
    list_residuals,
)
from paceline.train.state.same_model import check_model, check_one_run, check_optimizers
from paceline.train.state.saving import SaveHandle, Saving, Write
from paceline.train.state.tracked import Tracked, state_differs_error
from paceline.train.state.transfer import load_on_main, run_on_main
from paceline.train.state.verified import SharedVerification
from paceline.train.state.write import RunState
from paceline.train.step import SaveTimes
from paceline.train.update import Update
from paceline.world import World

log = logging.getLogger(__name__)


class Saver:
    """The saving and loading of a trainer's state.

    Args:
        world: the ranks.
        models: by name.
        updates: by the name of the model.
        loaders: by name; a loader made later is added to the same mapping.
        keep: checkpoints to keep.
        saving: makes the saves.
        copies: number of disks that hold each file if nodes have disks of their own, or `"auto"`.
        layout: resolved.
        reduction: for the checkpoint's identity.
        recipe_toml: the recipe to put beside the state.
        settings: those that the run's result depends on, see `settings.py`.
        bucket_cap_mb: of DistributedDataParallel.

    Attributes:
        folder: of the run; `None` before `load`.
        saving: makes the saves.
        tracked: objects and positions of loaders that are part of the checkpoints.
        has_raw_batches: whether some batches did not come from a loader, so that the trainer's own
            microbatch size counts.
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
        copies: int | str,
        layout: Layout,
        reduction: str,
        recipe_toml: str | None,
        settings: Settings,
        bucket_cap_mb: float,
    ) -> None:
        self.folder: Path | None = None
        self._open_folder: OpenFolder | None = None
        self._world = world
        self._models, self._updates, self._loaders = models, updates, loaders
        self._keep = keep
        self.saving = saving
        self._copies_wanted, self._copies = copies, 1
        self._layout = layout
        self._reduction = reduction
        self._recipe_toml = recipe_toml
        self._settings = settings
        self._bucket_cap_mb = bucket_cap_mb
        self._known = KnownPlans()
        self.tracked = Tracked()
        self.has_raw_batches = False
        self._saved_settings: dict[str, Any] | None = None
        self._accept: tuple[str, ...] = ()
        self._is_complete = True
        self._last: SaveHandle | None = None
        # Rank 0's: which run this is, from its first start on, and the number of this start.
        self._run_id, self._generation = secrets.token_hex(8), 1
        # Whether this start has begun, and rank 0's steps in the folder when it loaded one of them.
        self._has_begun, self._steps = True, set[int]()
        self._history: History | None = None
        self._disks: Disks | None = None
        self._failures: Failures | None = None
        self._grace = Grace(is_main=world.is_main)
        # Where nodes have disks of their own, else `None`.
        self._rows: SharedRows | None = None

    def save(self, counters: dict[str, Any], *, wait: bool, is_last: bool = False) -> SaveHandle:
        """Write a checkpoint of `counters["step"]`; collective. See `Trainer.save`."""
        last = self._last
        if last is None or last.step != counters["step"] or last.failed:
            self._check_tracked(is_last=is_last)
            last = self._last = self._save(counters)
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

    def _list_all(self, counters: dict[str, Any], *, is_sharded: bool) -> RunState:
        """Return this rank's part of the state to be saved; collective.

        Args:
            counters: of the trainer.
            is_sharded: whether every rank writes its residuals; else rank 0 gathers them.
        """
        hooks = gather_hooks(self._updates, self._bucket_cap_mb)
        gathered = {} if is_sharded else {"residuals": gather_residuals(self._updates)}
        held = list_residuals(self._updates) if is_sharded else {}

        def describe() -> dict[str, Any]:
            assert self._open_folder is not None
            self._open_folder.check()
            state = self._describe_state(counters)
            return state | {"hooks": hooks, "tracked": self.tracked.loaded} | gathered

        return replace(self._list_state(describe), residuals=held)

    def _save(self, counters: dict[str, Any]) -> SaveHandle:
        folder = self._require_folder()
        state = self._list_all(counters, is_sharded=self.saving.mode == SHARDED)
        assert self._history is not None
        write: Write | None = None
        if self._rows is not None:
            assert self._disks is not None
            write = partial(
                write_apart,
                disks=self._disks,
                mode=self.saving.mode,
                copies=self._copies,
                carry=self._rows.carry,
            )
        note_commit = self._history.note_commit
        step: int = counters["step"]
        return self.saving.save(folder, step, state, self.describe(), note_commit, write)

    def end_step(self) -> SaveTimes:
        """Wait until the state of the step before is copied; after the first step, get memory ready.

        Returns:
            The result of `Saving.take_times`.
        """
        if self.folder is not None:
            self.saving.end_step(partial(self._list_state, dict))
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
        await_writers(folder / CHECKPOINTS)
        self.folder, self._last = folder, None
        self._run_id, self._generation, self._has_begun = secrets.token_hex(8), 1, False
        self._disks = disks = find_disks(self._world, folder, lambda: _make_folder(folder))
        self._copies = count_copies(self._copies_wanted, disks)
        if self._world.is_main:
            warn_of_single_copies(self._copies, disks)
        checkpoints = CheckpointFolder(folder, keep=self._keep)
        self._rows = None if disks.is_common else SharedRows(self._world, disks, folder)
        newest: tuple[Path, Manifest] | None = None
        checks = SharedVerification(self._world, checkpoints)
        self._failures = Failures(self._world, disks, checkpoints)
        self._failures.settle()
        if not disks.is_common:
            newest = find_apart(self._world, disks, checkpoints, copies=self._copies)
        self._history = History(self._world, disks, folder)
        found = 0 if newest is None else newest[1].step
        self._history.check(None if disks.is_common else found)
        self._grace.read(folder)
        self._steps = run_on_main(self._world, lambda: set(checkpoints.steps()))
        path = newest and newest[0]
        if disks.is_common:
            path = checks.find_newest(_warn_of_skip)
        self._accept = tuple(accept)
        hooks: Saved = {}
        parts = self._parts()
        needed = NeededResiduals(self._updates, self._world.rank, self._world.world_size)

        def read() -> Any:
            self._open_folder = OpenFolder(folder)
            if path is None:
                return None
            loaded = open_usable(path)
            if disks.is_common:
                check_one_run(checkpoints.list_runs(), folder)
            self._run_id = loaded.identity.get("run", self._run_id)
            self._generation = loaded.identity.get("generation", 0) + 1
            for finding in check_identity(loaded.identity, self.describe()):
                log.warning("%s", finding)
            # Checked here, where tensors are whole: a rank cannot distinguish a part from a whole tensor of a
            # smaller model.
            check_optimizers(set(self._updates), set(loaded.optimizer))
            check_model(parts.whole_shapes(), loaded.model)
            # Unread, because other ranks need most of them.
            residuals = choose_residuals(loaded.state.pop("residuals", {}), self._updates)
            state = read_all(loaded.state)
            changed = self._check_settings(state)
            hooks.update(state.pop("hooks", {}))  # of each rank its own, see below
            if "comm_hook" in accept:
                hooks.clear()
            check_hooks(hooks, self._world.world_size, self._bucket_cap_mb)
            return {
                "model": loaded.model,
                "optimizer": loaded.optimizer,
                "state": state,
                "changed": changed,
                "hooks": list(hooks),
                "residuals": residuals,
            }

        def find_part(names: Names, shape: tuple[int, ...]) -> Part | None:
            return needed.find_part(names, shape) or parts.find_part(names, shape)

        def cut(names: Names, whole: Tensor) -> Tensor:
            return parts.cut(names, whole) if needed.needs(names) else torch.empty(0)

        tree = load_on_main(self._world, read, cut, find_part, checkpoints.path)
        if self._rows is not None:
            self._rows.resume(found)
        if tree is None:
            return None
        _load_models(self._models, tree["model"], parts)
        state = tree["state"]
        counters: dict[str, Any] = state["counters"]
        self._saved_settings, self._is_complete = state.get("settings"), False
        for name, update in self._updates.items():
            prefix = name_settings(name, self._updates, "")
            changed = [key.removeprefix(prefix) for key in tree["changed"] if key.startswith(prefix)]
            update.load(
                tree["optimizer"][name], state["updates"][name], step=counters["step"], changed=changed
            )
        restore_hooks(hooks, self._updates, tree["hooks"], self._world.device)
        needed.load(tree["residuals"], self._world.device)
        write_generators(state["rng"], self._world.device)
        self.tracked.load(state, parts)
        self._failures.begin(counters["step"])
        return counters

    def close(self, step: int) -> None:
        """Wait for writers to finish, and note the error that ends this rank.

        Args:
            step: number of the last complete step.
        """
        if self._failures is not None:
            self._failures.note(step + 1, self._world.error)
        self.saving.close()

    def check_loader(self, loader: Loader) -> None:
        """Compare a loader made after `load` with the saved one whose position it gets; collective."""
        if self._saved_settings is None:
            return
        saved = self._saved_settings["loaders"].get(loader.name, {})

        def check() -> None:
            changes = list_changes(saved, describe_loader(loader), [loader.name])
            refuse_changes(changes, self._accept, self.folder, is_recipe=self._recipe_toml is not None)

        run_on_main(self._world, check)

    def check_complete(self) -> None:
        """Begin this start; raise PL515 if a saved state has no owner; called before each step; collective.

        Raises:
            PacelineError: PL383 if another start has saved since `load`.
        """
        if not self._has_begun:
            self._begin()
        if self._is_complete:
            return
        self._is_complete = True
        refuse_changes(
            dict.fromkeys(self.tracked.list_loaded(), (None, None)),
            self._accept,
            self.folder,
            is_recipe=self._recipe_toml is not None,
        )
        self.tracked.drop_loaded()
        if self._saved_settings is not None and self._world.is_main:
            fresh = [name for name in self.tracked.own_names if name not in self._saved_settings["tracked"]]
            if fresh:
                warn_fresh_objects(fresh)

    def _check_settings(self, state: dict[str, Any]) -> list[str]:
        """Return names of settings that differ from the checkpoint; raise PL515 unless all are accepted."""
        saved = state.get("settings")
        if saved is None:
            warn_unknown_settings()
            return []
        self.has_raw_batches = "microbatch_size" in saved["run"]
        moved = {name: self._loaders[name] for name in saved["loaders"] if name in self._loaders}
        here = self._describe_settings(moved)
        before, now = dict(saved["run"]), dict(here["run"])
        for name in moved:
            before |= saved["loaders"][name]
            now |= here["loaders"][name]
        later = [key for name, keys in saved["loaders"].items() if name not in moved for key in keys]
        parts = [f"tracked.{name}" for name in saved["tracked"]]
        parts += [f"loaders.{name}" for name in saved["loaders"]]
        if self._recipe_toml is None:  # keys of a recipe stand for settings that a run may not have
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
                name: self._saved_settings["loaders"].get(name, {}) for name in self.tracked.loaded_loaders
            } | described
        return {"run": run, "loaders": described, "tracked": self.tracked.names}

    def _describe_state(self, counters: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's state of the run, without the tensors, hooks and tracked objects."""
        # A loader that has not moved, such as one for evaluation, has no position to save.
        moved = {name: loader for name, loader in self._loaders.items() if loader.has_moved}
        return {
            "loss": counters["loss"],  # `paceline checkpoint show` prints it
            "counters": counters,
            "updates": {name: update.state_dict() for name, update in self._updates.items()},
            "loaders": self.tracked.read_loaders(moved),
            "settings": self._describe_settings(moved),
            "rng": read_generators(self._world.device),
        }

    def _parts(self) -> Parts:
        return Parts(self._models, self._updates, self._layout, self._world.rank, self._known)

    def describe(self) -> dict[str, Any]:
        """Return the identity of this start's checkpoints; rank 0's counts."""
        identity = describe_identity(
            self._world.device,
            world_size=self._world.world_size,
            layout=str(self._layout),
            reduction=self._reduction,
        )
        return identity | {"run": self._run_id, "generation": self._generation}

    def _begin(self) -> None:
        """Number this start, so that no older one commits any more; collective.

        A start begins with its first step or save: one that only loads disturbs no other.
        """
        assert self.folder is not None
        assert self._disks is not None
        self._has_begun = True
        folder, is_common = self.folder, self._disks.is_common

        def begin() -> int:
            number = self._generation
            try:
                number = max(number, newest_generation(folder) + 1)
                if not is_common:  # the nodes that see each other decide
                    return number
                self._refuse_newer(folder)  # before the other start is kept from saving
                number = begin_generation(folder, number)
            except OSError as error:  # as for a save, a failing disk does not end training
                why = error.strerror or error
                log.warning("this start cannot be numbered in %s (%s): an older one may save", folder, why)
                return number
            self._refuse_newer(folder)
            return number

        self._generation = run_on_main(self._world, begin)

    def _refuse_newer(self, folder: Path) -> None:
        if new := set(list_checkpoints(folder / CHECKPOINTS)) - self._steps:
            raise PacelineError(
                "PL383",
                saw=f"Another start of the run in {folder} has saved step {max(new)} since this one loaded "
                "its state.",
                rule="A start goes on from the newest checkpoint, so that the run has one history.",
                fix="End the other start, and start this one again.",
            )

    def _require_folder(self) -> CheckpointFolder:
        if self.folder is None:
            raise PacelineError(
                "PL403",
                saw="save() before resume().",
                rule="Checkpoints go into the run's folder.",
                fix='Call trainer.resume("runs/demo") first; an empty or missing folder starts a new run.',
            )
        if not self._has_begun:
            self._begin()
        assert self._disks is not None
        generation = self._generation if self._disks.is_common else None
        return CheckpointFolder(self.folder, keep=self._keep, generation=generation)


def _load_models(models: Mapping[str, nn.Module], tensors: Mapping[str, Any], parts: Parts) -> None:
    """Copy this rank's parts of the tensors into the models."""
    with torch.no_grad():
        for name, tensor in model_tensors(models).items():
            if not parts.holds(name):
                continue
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
            saw=f"{folder} cannot be written to: {error.strerror}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder, or change its permissions.",
        ) from None


def _warn_of_skip(path: Path, findings: list[Finding]) -> None:
    for finding in findings:
        log.warning("%s", finding)
    log.warning("%s is left out; trying the one before it", path)
