"""Plants faults in saving, triggered by file operations and not by time.

A `Hook` is called at the file operations of rank 0 (`paceline.checkpoint.files.inject`). It waits for a save
and an operation in it, then kills a process or makes the file system fail, once.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder_names import LOCK, TMP, TRASH, step_name
from tests.chaos.processes import find_marked, kill, sort_by_role
from tests.chaos.setting import MARK

# The kinds of faults; the first word states whether a process is killed or the file system fails.
KINDS = (
    "kill before an operation",
    "kill in a write",
    "kill before the rename",
    "kill in retention",
    "fail a write",
    "fail the rename",
    "fill the disk",
    "remove a file",
    "kill in the copy",
)
_STEP = re.compile(rf"{re.escape(TMP)}step-0*(\d+)-")


@dataclass(frozen=True)
class Fault:
    """A fault, to be triggered once.

    Attributes:
        kind: of `KINDS`.
        save: number of the save in this start, from 1.
        place: place in that save: the number of the operation, the byte, or the number of the file.
        victim: role of the process that is killed, if one is.
        fired: path of a file that is written when the fault triggers, with the step that is being saved.
    """

    kind: str
    save: int
    place: int
    victim: str
    fired: str

    @property
    def kills(self) -> bool:
        """Whether it kills a process; otherwise the save fails."""
        return self.kind.startswith("kill")

    def dump(self) -> str:
        """Return the fault as text, for the command line."""
        return json.dumps(asdict(self))


def load_fault(text: str) -> Fault:
    """Parse the text of `dump`."""
    return Fault(**json.loads(text))


class Hook:
    """A hook at file operations that triggers a fault.

    Args:
        fault: its kind and place.
        strike: kills the victim; takes its role.
    """

    def __init__(self, fault: Fault, strike: Callable[[str], None]) -> None:
        self.fault = fault
        self._strike = strike
        self._saves = self._operations = self._bytes = self._removals = 0
        self._saving = ""
        self._fired = False

    def __call__(self, operation: str, path: Path, start: int, num_bytes: int) -> int | None:
        if operation == "make" and path.name == LOCK:
            self._saves += 1
            self._operations = self._bytes = 0
        if step := _STEP.search(str(path)):
            self._saving = step[1]
        if self.fault.kind == "kill in retention" and self._saves >= self.fault.save:
            # The first saves of a run remove nothing.
            self._kill_in_retention(operation, path)
        if self._fired or self._saves != self.fault.save:
            return None
        self._operations += 1
        kind, place = self.fault.kind, self.fault.place
        if kind == "kill before an operation" and self._operations == place:
            self._kill()
        elif kind == "remove a file":
            self._remove_a_file()
        elif operation == "rename" and path.name.startswith(TMP):
            if kind == "kill before the rename":
                self._kill()
            elif kind == "fail the rename":
                self._fail(errno.EIO, path)
        elif operation == "write" and kind in ("kill in a write", "fail a write", "fill the disk"):
            if self._bytes < place < self._bytes + num_bytes:
                num_bytes = place - self._bytes  # up to that byte; the hook is then called again
            elif self._bytes <= place < self._bytes + num_bytes:
                if kind == "kill in a write":
                    self._kill()
                else:
                    self._fail(errno.EIO if kind == "fail a write" else errno.ENOSPC, path)
            self._bytes += num_bytes
            return num_bytes or None
        return None

    def _remove_a_file(self) -> None:
        """Remove the n-th of the files that are in the new folder, once the one after it is there."""
        for folder in Path(self.fault.fired).parent.glob(f"out/checkpoints/{TMP}*"):
            files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            if len(files) > self.fault.place:
                self._note()
                files[self.fault.place - 1].unlink()

    def _kill_in_retention(self, operation: str, path: Path) -> None:
        """Kill before the n-th operation that removes a checkpoint: its renaming, then one per file."""
        is_renamed = operation == "rename" and path.name.startswith(step_name(0)[:5])
        if is_renamed:
            self._removals = 0
        if is_renamed or (operation == "remove" and TRASH in str(path)):
            self._removals += 1
            if self._removals == self.fault.place and not self._fired:
                self._kill()

    def _kill(self) -> None:
        self._note()
        self._strike(self.fault.victim)

    def _fail(self, number: int, path: Path) -> None:
        self._note()
        raise OSError(number, os.strerror(number), str(path))

    def _note(self) -> None:
        self._fired = True
        Path(self.fault.fired).write_text(self._saving)


def train_with_fault(fault: str, *args: Any) -> Any:
    """Train on a rank, with a fault at its file operations."""
    from paceline.checkpoint import files
    from paceline.cli.train import train_on_rank

    launcher_pid: int = inspect.signature(train_on_rank).bind(*args).arguments["launcher_pid"]
    parsed = load_fault(fault)
    with contextlib.ExitStack() as stack:
        if parsed.kind == "kill in the copy":
            _strike_in_copy(parsed, launcher_pid)
        else:
            stack.enter_context(files.inject(Hook(parsed, partial(strike, launcher_pid, "rank 0"))))
        return train_on_rank(*args)


def strike(launcher_pid: int, own_role: str, victim: str) -> None:
    """Kill the processes of a role, from a process that has `own_role`."""
    if victim == own_role:
        os.kill(os.getpid(), signal.SIGKILL)
    marked = find_marked(os.environ[MARK])
    if victim == "everything":  # this process last
        kill(process.pid for process in marked if process.pid != os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
    by_role = sort_by_role(marked, launcher_pid, Path(os.environ["TMPDIR"]))
    if victim == "all ranks":
        kill(pid for role in ("rank 0", "another rank") for pid in by_role.get(role, []))
    else:
        kill(by_role.get(victim, [])[:1])


def _strike_in_copy(fault: Fault, launcher_pid: int) -> None:
    """Strike before the n-th tensor of the copy of a save."""
    from paceline.checkpoint.writing.state_copy import StateCopy

    copy_late, copy = StateCopy._copy_late, StateCopy._copy
    counts = {"save": 0, "tensor": 0}

    def begin(self: Any) -> Any:
        counts["save"] += 1
        counts["tensor"] = 0
        return copy_late(self)

    def count(self: Any, target: Any, tensor: Any, *, non_blocking: bool = False) -> None:
        counts["tensor"] += 1
        is_due = (counts["save"], counts["tensor"]) == (fault.save, fault.place)
        if is_due and not Path(fault.fired).exists():
            Path(fault.fired).touch()
            strike(launcher_pid, "", fault.victim)
        copy(self, target, tensor, non_blocking=non_blocking)

    StateCopy._copy_late, StateCopy._copy = begin, count  # type: ignore[method-assign]
