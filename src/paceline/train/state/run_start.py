"""One start of a run: its folder as the ranks see it, the checkpoint that it goes on from, and its number."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.folder_names import CHECKPOINTS, list_checkpoints
from paceline.checkpoint.generation import begin_generation, newest_generation
from paceline.errors import PacelineError
from paceline.train.belongings import OpenFolder
from paceline.train.state.folder_view import check_view, find_view
from paceline.train.state.history import History
from paceline.train.state.same_model import check_one_run
from paceline.train.state.transfer import run_on_main
from paceline.train.state.verified import SharedVerification
from paceline.world import World

log = logging.getLogger(__name__)


class RunStart:
    """A start of a run, made when it resumes; collective.

    It begins with its first step or save: a start that only loads disturbs no other.

    Args:
        keep: checkpoints to keep.
        is_sharded: whether every rank writes its share.

    Attributes:
        newest: the checkpoint that it goes on from, as this rank names it; `None` for a new run.
        run_id: the run, from its first start on; rank 0's counts.
        generation: number of this start; rank 0's counts.
        history: of the run's checkpoints.
    """

    def __init__(self, world: World, folder: Path, *, keep: int, is_sharded: bool) -> None:
        self.folder = folder
        self.run_id, self.generation = secrets.token_hex(8), 1
        self._world, self._keep, self._is_sharded = world, keep, is_sharded
        self._has_begun = False
        self._open_folder: OpenFolder | None = None
        view = find_view(world, folder)
        check_view(world, view, folder, is_sharded=is_sharded)
        checkpoints = CheckpointFolder(folder, keep=keep)
        self.history = History(world, view, folder)
        self.history.check()
        # Rank 0's, when it looks for a checkpoint to load.
        self._steps = run_on_main(world, lambda: set(checkpoints.steps()))
        self.newest = SharedVerification(world, checkpoints).find_newest()

    def open(self) -> None:
        """Note which folder this is, so that another one in its place is detected; on ranks that write."""
        self._open_folder = OpenFolder(self.folder)

    def adopt(self, identity: Mapping[str, Any]) -> None:
        """Go on with the run of a checkpoint; on rank 0."""
        check_one_run(CheckpointFolder(self.folder, keep=self._keep).list_runs(), self.folder)
        self.run_id = identity.get("run", self.run_id)
        self.generation = identity.get("generation", 0) + 1

    def begin(self) -> None:
        """Number this start, so that no older one commits any more; collective, the first time."""
        if self._has_begun:
            return
        self._has_begun = True
        folder = self.folder

        def begin() -> int:
            number = self.generation
            try:
                number = max(number, newest_generation(folder) + 1)
                self._refuse_newer()  # before the other start is kept from saving
                number = begin_generation(folder, number)
            except OSError as error:  # as for a save, a failing disk does not end training
                why = error.strerror or error
                log.warning("this start cannot be numbered in %s (%s): an older one may save", folder, why)
                return number
            self._refuse_newer()
            return number

        self.generation = run_on_main(self._world, begin)
        if self._is_sharded and not self._world.is_main:
            with suppress(OSError):  # its saves report that
                self.open()

    def begin_save(self, best: int | None) -> CheckpointFolder:
        """Return the folder that a save of this start goes into, which keeps step `best`; collective."""
        self.begin()
        check = None if self._open_folder is None else self._open_folder.check
        return CheckpointFolder(self.folder, self._keep, self.generation, best, check)

    def _refuse_newer(self) -> None:
        if new := set(list_checkpoints(self.folder / CHECKPOINTS)) - self._steps:
            raise PacelineError(
                "PL383",
                saw=f"Another start of the run in {self.folder} has saved step {max(new)} since this one "
                "loaded its state.",
                rule="A start goes on from the newest checkpoint, so that the run has one history.",
                fix="End the other start, and start this one again.",
            )
