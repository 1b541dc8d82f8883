"""Keeps a run from starting again from step 1 after it has saved, whatever became of its checkpoints.

After each commit the first rank of every disk notes the step: in the run's folder, and in the folder of the
launcher that started it, which outlives its ranks. When a run resumes, all disks report what they hold and
what they know. If nobody has a checkpoint and anybody knows of one, the run is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.manifest import FILE_NAME
from paceline.errors import PacelineError
from paceline.phrases import join
from paceline.train.state.disks import Disks, name_rank, raise_any
from paceline.train.state.transfer import gather
from paceline.world import World

NOTE = ".saved"


@dataclass(frozen=True)
class _Known:
    """What a rank knows of the run; of a disk, its first rank knows.

    Attributes:
        name: of the disk.
        host: of the rank.
        step: of the newest checkpoint there, 0 for none.
        digest: of that checkpoint's manifest.
        noted: the newest step that was saved, as noted in the folder; 0 for none.
        launched: the newest step that earlier ranks of this launcher have saved; 0 for none.
    """

    name: str
    host: str
    step: int
    digest: str
    noted: int
    launched: int

    @property
    def newest(self) -> int:
        """The newest step that it knows of."""
        return max(self.step, self.noted, self.launched)

    def describe(self) -> str:
        """Return who knows of which step, as a clause."""
        if self.step == self.newest:
            return f"{self.name} has a checkpoint of step {self.step}"
        if self.noted == self.newest:
            return f"{self.name} noted that step {self.noted} was saved"
        return f"the launcher on {self.host} has restarted its ranks, and they had saved step {self.launched}"


class History:
    """What the nodes of a run know of its checkpoints.

    Args:
        world: the ranks.
        disks: of the run's folder.
        folder: of the run, as this rank sees it.
    """

    def __init__(self, world: World, disks: Disks, folder: Path) -> None:
        self._world = world
        self._disks = disks
        self._folder = folder

    def check(self) -> None:
        """Compare what all disks hold and know; collective, once per resume. Sends about 100 bytes per rank.

        Raises:
            PacelineError: PL550 if rank 0 has no checkpoint although the run has saved one, PL318 if another
                disk knows of a newer checkpoint than rank 0 has, PL319 if two disks hold different
                checkpoints of one step.
        """
        gathered = gather(self._world, self._look())
        raise_any(each for each in gathered if isinstance(each, PacelineError))
        known = [each for each in gathered if isinstance(each, _Known)]
        main = known[0]
        newest = max(known, key=lambda each: each.newest)
        if not main.step and newest.newest:
            raise_any([self._lost_error(known)])
        others = [each for each in known[1:] if max(each.step, each.noted) > main.step]
        if others:
            raise_any([self._older_error(main, max(others, key=lambda each: each.newest))])
        for other in known[1:]:
            can_compare = other.step == main.step and other.digest and main.digest
            if can_compare and other.digest != main.digest:
                raise_any([self._two_error(main, other)])

    def note_commit(self, step: int) -> None:
        """Note that a step is saved, if this rank is the first of its disk or of its launcher."""
        if self._disks.leads:
            _write_note(self._folder / NOTE, step)
        if self._world.local_rank == 0 and (path := _launcher_note(self._folder)) is not None:
            _write_note(path, step)

    def _look(self) -> _Known | PacelineError:
        step, digest, noted = 0, "", 0
        if self._disks.leads:
            noted = _read_note(self._folder / NOTE)[0]
            try:
                steps = CheckpointFolder(self._folder, keep=1).steps()
            except PacelineError as error:  # the other ranks wait for an answer
                return name_rank(self._world, error)
            if steps:
                step = max(steps)
                with suppress(OSError):
                    digest = hashlib.sha256((steps[step] / FILE_NAME).read_bytes()).hexdigest()
        path = _launcher_note(self._folder) if self._world.local_rank == 0 else None
        launched, pid = (0, 0) if path is None else _read_note(path)
        host = socket.gethostname()
        return _Known(
            self._disks.disks[self._disks.own].name,
            host,
            step,
            digest,
            noted,
            launched * (pid != os.getpid()),
        )

    def _lost_error(self, known: list[_Known]) -> PacelineError:
        knowing = list(dict.fromkeys(each.describe() for each in known if each.newest))
        shown = join([*knowing[:3], f"{len(knowing) - 3} more know of it"] if len(knowing) > 3 else knowing)
        return PacelineError(
            "PL550",
            saw=f"There is no checkpoint in {self._folder} on {known[0].name}, where rank 0 runs, but the "
            f"run has saved before: {shown}.",
            rule="A run that has saved never starts again from step 1 by itself.",
            fix=f"Bring back the disk or the node with its checkpoints. To start over, remove "
            f"{self._folder} on every node, and start the job anew.",
        )

    def _older_error(self, main: _Known, newest: _Known) -> PacelineError:
        return PacelineError(
            "PL318",
            saw=f"Rank 0, on {main.name}, would resume from {self._folder}, and its newest checkpoint "
            f"there is of step {main.step}; but {newest.describe()}.",
            rule="Rank 0 reads the checkpoints. Without the newest one, it would repeat steps that are "
            "already done.",
            fix="Copy the checkpoints to the node of rank 0, start with their node as node 0, or use a "
            f"folder on a shared disk. To start over, remove {self._folder} on every node.",
        )

    def _two_error(self, main: _Known, other: _Known) -> PacelineError:
        return PacelineError(
            "PL319",
            saw=f"{self._folder} holds different checkpoints of step {main.step} on {main.name} and on "
            f"{other.name}.",
            rule="The nodes have trained two separate runs, and only one of them can continue.",
            fix="Decide which one is right, and remove the folder on the other node.",
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
