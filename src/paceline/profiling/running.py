"""Records a job that already runs: finds its launcher's folder, and leaves a request there.

The ranks of this node answer in files. First all report how many steps they have taken; then a step ahead of
all of them is chosen, and each records from there.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.rank.requests import ENTRY, FIRST, REQUEST, read_table, write_whole
from paceline.launching.watcher import SOCKET
from paceline.phrases import name_ranks
from paceline.profiling.rank.asked import DONE, FAILED, TOO_LATE, name_answer
from paceline.profiling.rank.asked import ENTRY as ANSWER
from paceline.profiling.rank.recorder import PASSING, RecordSettings

_LOOK_S = 0.2
# Ranks look for requests each second; on a busy machine their threads come late.
_ANSWER_S = 30.0
# So long before the step at which ranks begin, they hear of it; doubled if that was too late.
_AHEAD_S = 3.0
_PROC = Path("/proc")


def find_job(pid: int) -> Path:
    """Return the launcher's folder of the job that a process launches or belongs to.

    Raises:
        PacelineError: PL915 if there is none.
    """
    if not (_PROC / "net" / "unix").exists():
        raise _job_error(pid, "jobs are found by Linux's /proc, which this system lacks")
    if not (_PROC / str(pid)).exists():
        raise _job_error(pid, "no process has this number")
    sockets: dict[str, Path] = {}
    for line in (_PROC / "net" / "unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].endswith(f"/{SOCKET}"):
            sockets[fields[6]] = Path(fields[7])
    each: int | None = pid
    while each is not None and each > 1:
        try:
            found = _find_socket(each, sockets)
        except PermissionError:
            raise _job_error(pid, "it belongs to another user") from None
        if found is not None:
            return found.parent
        each = _read_parent(each)
    raise _job_error(pid, "neither it nor a process above it is a launcher that watches its ranks")


def _find_socket(pid: int, sockets: dict[str, Path]) -> Path | None:
    """Return the path of the watcher's socket that a process has open."""
    for name in _list_descriptors(pid):
        with suppress(FileNotFoundError):
            target = os.readlink(_PROC / str(pid) / "fd" / name)
            inode = target.removeprefix("socket:[").removesuffix("]")
            if target.startswith("socket:[") and inode in sockets:
                return sockets[inode]
    return None


def _list_descriptors(pid: int) -> list[str]:
    with suppress(FileNotFoundError):  # it has just ended
        return os.listdir(_PROC / str(pid) / "fd")
    return []


def _read_parent(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        # The name of the program may have spaces and parentheses.
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    return None


def _job_error(pid: int, reason: str) -> PacelineError:
    return PacelineError(
        "PL915",
        saw=f"--pid {pid}: {reason}.",
        rule="A running job is recorded by the threads that watch its ranks: those of `paceline run`, "
        "`paceline train` and `paceline.launch`, without --no-watch.",
        fix="Give the process number of such a launcher, or of one of its ranks, on its node.",
    )


class RunningJob:
    """A job that is asked for a recording.

    Args:
        folder: its launcher's.
        settings: what to record; `after` follows from the step.
        report: prints a line on what happens next.
    """

    def __init__(self, folder: Path, settings: RecordSettings, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._settings = asdict(settings)
        self._report = report
        self._name = ""

    def record(self, first: int | None) -> None:
        """Make all ranks of this node record, and wait until they are done or the job has ended.

        Args:
            first: the step to begin with; `None` for the next one that all ranks can begin with.

        Raises:
            PacelineError: PL916 if ranks do not answer, cannot record, or are beyond the step already.
        """
        ahead_s = _AHEAD_S
        self._refuse_second()
        try:
            while True:
                self._name = uuid.uuid4().hex
                chosen = first if first is not None else self._choose(ahead_s)
                if chosen is None:
                    return  # the job has ended
                self._report(f"recording starts with step {chosen}")
                late = self._wait(chosen)
                if not late:
                    return
                if first is not None:
                    self._cancel()
                    raise _answer_error(f"{name_ranks(late)} had ended step {first - PASSING} already")
                ahead_s *= 2
        finally:
            with suppress(OSError):
                (self._folder / REQUEST).unlink()
            for path in self._folder.glob(name_answer("*")):
                path.unlink(missing_ok=True)

    def _refuse_second(self) -> None:
        for there in (read_table(self._folder / name) for name in (FIRST, REQUEST)):
            if there is not None and (_PROC / str(there.get("asker"))).exists():
                raise _answer_error(f"process {there['asker']} is recording the job already")

    def _cancel(self) -> None:
        """Leave another request for the other ranks, which makes them forget this one."""
        self._name = uuid.uuid4().hex
        self._ask(0)
        until = time.monotonic() + _ANSWER_S
        while self._folder.exists() and time.monotonic() < until:
            answers = self._read()
            if answers and len(answers) >= max(table["ranks"] for table in answers):
                return
            time.sleep(_LOOK_S)

    def _ask(self, first: int) -> None:
        table: dict[str, Any] = {ENTRY: ANSWER, "name": self._name, "asker": os.getpid()}
        write_whole(self._folder / REQUEST, {**table, "settings": self._settings, "first": first})

    def _read(self) -> list[dict[str, Any]]:
        found = (read_table(path) for path in self._folder.glob(name_answer("*")))
        return [table for table in found if table is not None and table["request"] == self._name]

    def _choose(self, ahead_s: float) -> int | None:
        """Return a step that is some seconds ahead of all ranks; `None` if the job has ended."""
        before: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + _ANSWER_S
        has_said = False
        self._ask(0)
        while self._folder.exists():
            time.sleep(_LOOK_S)
            answers = {table["rank"]: table for table in self._read()}
            for rank, table in answers.items():
                before.setdefault(rank, table)
            is_whole = bool(answers) and len(answers) >= max(table["ranks"] for table in answers.values())
            if not is_whole:
                if time.monotonic() > until:
                    silent = "no rank has" if not answers else f"only {name_ranks(sorted(answers))} have"
                    raise _answer_error(f"{silent} answered within {_ANSWER_S:.0f} s")
                continue
            if max(table["world_size"] for table in answers.values()) > len(answers):
                raise _answer_error(
                    "the job has ranks on other nodes, which do not know when these begin",
                    "Run the command with the same --from STEP on each node.",
                )
            took = {rank: table["time_s"] - before[rank]["time_s"] for rank, table in answers.items()}
            if min(took.values()) <= 0:
                continue  # a second answer shows how long steps take
            if not any(table["count"] for table in answers.values()):
                if not has_said:
                    self._report("no optimizer step has ended yet: waiting for the first one")
                has_said = True
                continue
            rate: float = max((t["count"] - before[r]["count"]) / took[r] for r, t in answers.items())
            newest = max(int(t["count"]) for t in answers.values())
            return newest + PASSING + 1 + math.ceil(rate * ahead_s)
        return None

    def _wait(self, first: int) -> Sequence[int]:
        """Wait until all ranks have recorded; return those that were beyond the step already."""
        self._ask(first)
        until = time.monotonic() + _ANSWER_S
        while self._folder.exists():
            time.sleep(_LOOK_S)
            answers = self._read()
            states = [table["state"] for table in answers]
            if FAILED in states:
                failed = next(table for table in answers if table["state"] == FAILED)
                raise _answer_error(f"rank {failed['rank']} could not record: {failed['reason']}")
            if TOO_LATE in states:
                return sorted(table["rank"] for table in answers if table["state"] == TOO_LATE)
            if not answers and time.monotonic() > until:
                raise _answer_error(f"no rank has answered within {_ANSWER_S:.0f} s")
            is_whole = bool(answers) and len(answers) >= max(table["ranks"] for table in answers)
            if is_whole and all(state == DONE for state in states):
                return ()
        return ()


def _answer_error(
    saw: str, fix: str = "Try again, or leave --from out; the job's own messages may give the reason."
) -> PacelineError:
    return PacelineError(
        "PL916",
        saw=f"{saw}.",
        rule="All ranks of a job begin a recording with the same step, and one recording runs at a time.",
        fix=fix,
    )
