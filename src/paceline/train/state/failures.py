"""Puts a checkpoint aside if two starts that went on from it failed at the same step.

The step distinguishes a broken state from a run that is killed now and then:

1. A rank that ends by an error of its own notes the step, and the checkpoint that its start went on from.
   Some ends are not noted, because no state causes them: a kill, also of a loader worker, a request to stop,
   an error that follows from the end of another rank, and an error of the disk or of the settings.
2. At the next start, the disks report their notes. If this start and an earlier one failed at the same step
   after the same checkpoint, it is renamed, and the run goes on from the one before. The only one stays.
3. If the run then fails at that step once more, the checkpoint was not the cause: it gets its name back, and
   no other one is put aside for that step.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass

from paceline.checkpoint import CheckpointFolder, files
from paceline.checkpoint.names import FAILED, step_name
from paceline.errors import PacelineError, comes_from_lost_peer
from paceline.train.state.disks import Disks
from paceline.train.state.transfer import gather
from paceline.world import World

log = logging.getLogger(__name__)

# Errors with a page that a broken state may cause: copies differ, losses are not finite.
_OF_STATES = ("PL418", "PL431")
# torch's words for a loader worker that was killed: memory ran out, or somebody killed it.
_WORKER_ENDED = "DataLoader worker (pid"
_NOTE, _HISTORY = ".failed-at-", ".failures.json"
_MAX_LOADS, _MAX_HISTORY = 2, 20


@dataclass(frozen=True, order=True)
class FailedStart:
    """The failure of one start.

    Attributes:
        step: that failed.
        source: step of the checkpoint that the start went on from.
    """

    step: int
    source: int


@dataclass(frozen=True)
class _NotesOfDisk:
    """The notes and checkpoints on one disk.

    Attributes:
        history: failures of earlier starts, the oldest first.
        notes: of the ranks of the last start.
        steps: of its checkpoints.
    """

    history: list[FailedStart]
    notes: list[FailedStart]
    steps: set[int]


class Failures:
    """The failures of a run's starts.

    Args:
        world: the ranks.
        disks: of the run's folder.
        checkpoints: of the run, as this rank sees them.
    """

    def __init__(self, world: World, disks: Disks, checkpoints: CheckpointFolder) -> None:
        self._world, self._disks, self._checkpoints = world, disks, checkpoints
        self._source = 0

    def settle(self) -> None:
        """Put a checkpoint aside, or back, if the last start's failure calls for it; collective."""
        own = self._read() if self._disks.leads else None
        known = [each for each in gather(self._world, own) if each is not None]
        notes = [note for each in known for note in each.notes]
        if not notes:
            return
        last = min(notes)
        history = [*max((each.history for each in known), key=len), last][-_MAX_HISTORY:]
        if self._disks.leads:
            self._write(history)
        others = {each.source for each in history if each.step == last.step} - {last.source}
        having = [each.steps for each in known if last.source in each.steps]
        if others:
            self._put_back(last.step, others)
        elif history.count(last) >= _MAX_LOADS and having and min(set.intersection(*having)) < last.source:
            if self._disks.leads:
                self._put_aside(last.source)
            self._tell(
                "%d starts went on from the checkpoint of step %d and failed at step %d. It is not used "
                "again, and is now %s; the run goes on from the one before. [PL556]",
                history.count(last),
                last.source,
                last.step,
                f"{FAILED}{step_name(last.source)}",
            )

    def begin(self, source: int) -> None:
        """Note the step of the checkpoint that this start goes on from; 0 for none."""
        self._source = source

    def note(self, step: int, error: BaseException | None) -> None:
        """Note the error by which this rank ends, if the state that it went on from may be the cause.

        Args:
            step: the one after the last complete step.
            error: `None` if it ends without one.
        """
        if error is not None and may_come_from_state(error):
            with suppress(OSError):
                path = self._checkpoints.path / f"{_NOTE}{self._world.rank:05d}"
                path.write_text(json.dumps([step, self._source]) + "\n", encoding="utf-8")

    def _put_aside(self, step: int) -> None:
        """Rename a checkpoint so that no start goes on from it."""
        with suppress(OSError):
            path = self._checkpoints.path / step_name(step)
            aside = path.with_name(f"{FAILED}{path.name}")
            if aside.exists():
                files.remove(aside)
            files.rename(path, aside)

    def _put_back(self, step: int, sources: set[int]) -> None:
        """Rename checkpoints back, because the run fails at a step whichever it goes on from."""
        back = []
        for source in sorted(sources):
            path = self._checkpoints.path / step_name(source)
            aside = path.with_name(f"{FAILED}{path.name}")
            with suppress(OSError):
                if self._disks.leads and aside.exists() and not path.exists():
                    files.rename(aside, path)
                    back.append(path.name)
        names = sorted({name for each in gather(self._world, back) for name in each})
        if names:
            self._tell(
                "The run failed at step %d again, from an older checkpoint. %s was not the cause, and is "
                "used again. [PL556]",
                step,
                ", ".join(names),
            )

    def _read(self) -> _NotesOfDisk:
        folder = self._checkpoints.path
        notes = []
        for path in sorted(folder.glob(f"{_NOTE}*")):
            with suppress(OSError, ValueError, TypeError):
                note = FailedStart(*json.loads(path.read_bytes()))
                notes += [note] if note.source else []  # a start from scratch has no checkpoint to blame
            with suppress(OSError):
                path.unlink()
        history = []
        with suppress(OSError, ValueError, TypeError):
            history = [FailedStart(*each) for each in json.loads((folder / _HISTORY).read_bytes())]
        steps: set[int] = set()
        with suppress(PacelineError):  # the search for the newest one reports it
            steps = set(self._checkpoints.steps())
        return _NotesOfDisk(history, notes, steps)

    def _write(self, history: list[FailedStart]) -> None:
        path = self._checkpoints.path / _HISTORY
        partial = path.with_name(f"{path.name}.partial")
        with suppress(OSError):
            partial.write_text(json.dumps([[each.step, each.source] for each in history]) + "\n")
            os.replace(partial, path)

    def _tell(self, text: str, *values: object) -> None:
        if self._world.is_main:
            log.warning(text, *values)


def may_come_from_state(error: BaseException) -> bool:
    """Return whether a broken state may cause an error that ends a rank."""
    if isinstance(error, PacelineError):
        return error.code in _OF_STATES
    if not isinstance(error, Exception) or isinstance(error, (OSError, MemoryError)):
        return False
    if str(error).startswith(_WORKER_ENDED):
        return False
    return not type(error).__module__.startswith("torch.distributed") and not comes_from_lost_peer(error)
