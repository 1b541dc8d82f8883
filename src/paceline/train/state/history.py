"""Keeps a run from starting again from step 1 after it has saved, whatever became of its checkpoints.

After each commit a rank of every node notes the step: in the run's folder, and in the folder of the launcher
that started it, which outlives its ranks. When a run resumes, all nodes report what they hold and what they
know. If rank 0 has no checkpoint and anybody knows of one, the run is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.checkpoint import CheckpointFolder
from paceline.errors import PacelineError
from paceline.phrases import join
from paceline.train.disk_thread import WAIT_S, DiskThread
from paceline.train.state.folder_view import FolderView
from paceline.train.state.transfer import gather, name_rank, raise_any
from paceline.world import World

log = logging.getLogger(__name__)

NOTE = ".saved"


@dataclass(frozen=True)
class _Known:
    """A rank's knowledge of the run; each node's folder is known to one of its ranks.

    Attributes:
        step: of the newest checkpoint there, 0 for none.
        noted: the newest step that was saved, as noted in the folder; 0 for none.
        launched: the newest step that earlier ranks of this launcher have saved; 0 for none.
    """

    host: str
    step: int
    noted: int
    launched: int

    @property
    def newest(self) -> int:
        """The newest step that it knows of."""
        return max(self.step, self.noted, self.launched)

    def describe(self) -> str:
        """Return which nodes know of which step, as a clause."""
        if self.step == self.newest:
            return f"{self.host} has a checkpoint of step {self.step}"
        if self.noted == self.newest:
            return f"{self.host} noted that step {self.noted} was saved"
        return f"the launcher on {self.host} has restarted its ranks, and they had saved step {self.launched}"


class History:
    """The record of a run's checkpoints on its nodes.

    Args:
        folder: of the run, as this rank sees it.
    """

    def __init__(self, world: World, view: FolderView, folder: Path) -> None:
        self._world = world
        self._folder = folder
        # Rank 0, and a rank of every node that does not see its folder.
        self._notes = world.is_main or (world.local_rank == 0 and not view.sees)
        self._disk = DiskThread()

    def check(self) -> None:
        """Compare what all nodes know; collective, once per resume. Sends about 100 bytes per rank."""
        gathered = gather(self._world, self._find_known())
        raise_any(each for each in gathered if isinstance(each, PacelineError))
        known = [each for each in gathered if isinstance(each, _Known)]
        newest = max(known, key=lambda each: each.newest)
        found = known[0].step
        if not found and newest.newest:
            raise_any([self._lost_error(known)])
        if newest.newest > found and self._world.is_main:
            log.warning(
                "%s, and the newest checkpoint here is of step %d: the run takes the steps since then again",
                newest.describe(),
                found,
            )

    def note_commit(self, step: int) -> None:
        """Note that a step is saved, if this rank is the first of its folder or of its launcher."""
        if self._disk.wait(0.0):  # else the disk has not taken the last note, which is almost as good
            self._disk.begin(partial(self._write_notes, step))
            self._disk.wait(WAIT_S)

    def _write_notes(self, step: int) -> None:
        if self._notes:
            _write_note(self._folder / NOTE, step)
        if self._world.local_rank == 0 and (path := _launcher_note(self._folder)) is not None:
            _write_note(path, step)

    def _find_known(self) -> _Known | PacelineError:
        step, noted = 0, 0
        if self._notes:
            noted = _read_note(self._folder / NOTE)[0]
            try:
                steps = CheckpointFolder(self._folder, keep=1).steps()
            except PacelineError as error:  # the other ranks wait for an answer
                return name_rank(self._world, error)
            step = max(steps, default=0)
        path = _launcher_note(self._folder) if self._world.local_rank == 0 else None
        launched, pid = (0, 0) if path is None else _read_note(path)
        return _Known(socket.gethostname(), step, noted, launched * (pid != os.getpid()))

    def _lost_error(self, known: list[_Known]) -> PacelineError:
        knowing = list(dict.fromkeys(each.describe() for each in known if each.newest))
        shown = join(
            [*knowing[:3], f"{len(knowing) - 3} more have a record of it"] if len(knowing) > 3 else knowing
        )
        return PacelineError(
            "PL550",
            saw=f"There is no checkpoint in {self._folder} on {known[0].host}, the node of rank 0, but the "
            f"run has saved before: {shown}.",
            rule="A run that has saved never starts again from step 1 on its own.",
            fix=f"Bring back the disk or the node with its checkpoints, as the node of rank 0, or copy them "
            f"there; better, use a folder that all nodes share. To start over, remove "
            f"{self._folder} on every node, and start the job anew.",
        )


def _launcher_note(folder: Path) -> Path | None:
    """Return the file in which the launcher's ranks note a saved step, or `None` without such a launcher.

    torchelastic's agent gives each rank a file for its error, `FOLDER/attempt_N/RANK/error.json`, and
    `FOLDER` is the same for all attempts.
    """
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if len(path.parents) < 4 or not path.parents[1].name.startswith("attempt_"):
        return None
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()
    return path.parents[2] / f"saved-{digest[:16]}"


def _write_note(path: Path, step: int) -> None:
    with suppress(OSError):  # a full disk keeps no note, and the checkpoint itself is there
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps({"step": step, "pid": os.getpid()}) + "\n", encoding="utf-8")
        os.replace(partial, path)


def _read_note(path: Path) -> tuple[int, int]:
    """Return the step and the process of a note, or zeros if there is none."""
    try:
        note = json.loads(path.read_bytes())
        return int(note["step"]), int(note["pid"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0
