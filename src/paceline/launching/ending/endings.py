"""The record that a rank leaves at its end, and the choice of the end that is the cause.

Every rank that fails or is asked to stop writes one small JSON file into a folder of the launcher.
When one rank fails, the others soon fail too, because their peer is gone. They are marked as followers, wait
a moment so that the cause is seen first, and are never reported instead of it.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import PacelineError, comes_from_lost_peer
from paceline.exit_codes import STOPPED
from paceline.launching.ending.tracebacks import find_error_line, find_own_frame, fold

# gloo's words about data that is longer than expected.
_BYTES = re.compile(r"op\.preamble\.length <= op\.nbytes\. \d+ vs \d+")
# Of terminals, in messages of compilers and loggers.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\r(?!\n)")
_LONG_LINE = 500


class RankFailed(Exception):  # noqa: N818 (named after the event)
    """The error of a rank that failed with an exception that Paceline does not explain.

    Attributes:
        rank: the one that failed first.
        status: the exit code of its process (negative: the signal that killed it).
        signal_name: such as `"SIGKILL"`, or None.
        trace: the traceback on that rank, or an empty string where it left none.
        hint: what else is known; may be empty.
        code: of the page, PL330 or PL331.
    """

    exit_code = 1

    def __init__(self, rank: int, status: int, trace: str = "", hint: str = "") -> None:
        super().__init__(rank, status, trace, hint)
        self.rank = rank
        self.status = status
        self.trace = trace
        self.hint = hint
        self.signal_name = name_signal(status)
        is_detailed = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        if self.signal_name == "SIGSEGV" and (_DDP_STARTS in trace or (is_detailed and not trace)):
            self.hint = f"{_DETAIL}\n{hint}".rstrip()
        elif _PORT_TAKEN in trace:
            self.hint = f"{_SERVES_ALONE}\n{hint}".rstrip()
        self.code = "PL330" if trace and self.signal_name is None else "PL331"

    @property
    def headline(self) -> str:
        """Return a line with the failed rank, the place and the error."""
        frame = find_own_frame(self.trace)
        where = f", at {frame.where}" if frame is not None else ""
        if self.signal_name is not None:
            return f"rank {self.rank} was killed by {self.signal_name}{where}."
        if self.trace:
            return f"rank {self.rank} failed first{where}: {find_error_line(self.trace)}"
        return f"rank {self.rank} exited with code {self.status} and left no traceback."

    def __str__(self) -> str:
        parts = [
            f"{self.headline} [{self.code}]",
            *([f"\n{fold(self.trace)}\n"] if self.trace else []),
            *([self.hint] if self.hint else []),
        ]
        return "\n".join(parts).rstrip()


class PumpLost(Exception):  # noqa: N818 (named after the event)
    """The error of a launch whose pump was killed; its ranks were ended."""

    exit_code = 1
    code = "PL372"

    def __str__(self) -> str:
        return (
            "the process that copies the ranks' output was killed from outside; the ranks were ended, "
            "because their output would have been lost. [PL372]"
        )


_DDP_STARTS = "in _ddp_init_helper"
_PORT_TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen"
_SERVES_ALONE = (
    "Rank 0 alone serves a store. If several ranks join as rank 0, let each take its number from RANK; if "
    "the script starts its own processes, use --nproc-per-node 1; else another program has the port."
)
_DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch crash where DDP starts with gloo; INFO works."


def name_signal(status: int) -> str | None:
    """Return the signal that ended a process, by its status; `None` if none did."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


@dataclass(frozen=True)
class Ending:
    """The end of one rank; a file holds it for the launcher, and a last report for the watcher.

    Attributes:
        rank: which one.
        kind: `"error"`, `"exit"` for `sys.exit`, `os._exit` and Ctrl-C, or `"abort"` for an exception of C++
            that is not caught. `os._exit` and `"abort"` leave no file.
        code: the exit code, negative for a signal.
        time_s: when, in seconds since 1970 (the ranks of one machine share its clock).
        follower: whether it failed because a peer was gone.
        words: after "it": `failed with ValueError: ...`, `called sys.exit(0)`.
        trace: the traceback; not in a report, which has frames.
        pickled: a `PacelineError`, as base64 of its pickle; not in a report.
    """

    rank: int
    kind: Literal["error", "exit", "abort"]
    code: int
    time_s: float
    follower: bool = False
    words: str = ""
    trace: str = ""
    pickled: str = ""

    def error(self) -> PacelineError | None:
        """Rebuild the rank's own `PacelineError`, if it raised one, with the user's line as a note."""
        if not self.pickled:
            return None
        error = pickle.loads(base64.b64decode(self.pickled))
        frame = find_own_frame(self.trace)
        if frame is not None:
            error.add_note(f"at {frame.where}")
        return error if isinstance(error, PacelineError) else None


def describe_ending(rank: int, error: BaseException) -> Ending:
    """Turn the exception that ended a rank's script or function into a record."""
    now = time.time()
    if isinstance(error, SystemExit):
        code = as_status(error.code) if isinstance(error.code, int) else int(error.code is not None)
        words = f"called sys.exit({'' if error.code is None else repr(error.code)[:80]})"
        trace = "" if isinstance(error.code, int | None) else str(error.code)
        return Ending(rank, "exit", code, now, words=words, trace=trace)
    trace = _COLOURS.sub("", "".join(traceback.format_exception(error)))
    words = f"failed with {_name_error(error)}"
    if isinstance(error, KeyboardInterrupt):
        return Ending(rank, "exit", 128 + signal.SIGINT, now, words=words, trace=trace)
    follower = comes_from_lost_peer(error)
    if isinstance(error, PacelineError):
        pickled = base64.b64encode(pickle.dumps(error)).decode()
        return Ending(rank, "error", error.exit_code, now, follower, words, trace, pickled)
    return Ending(rank, "error", 1, now, follower, words, trace)


def as_status(code: int) -> int:
    """Return the part of an exit code that fits into a process's status, which has 8 bits."""
    return code & 0xFF


def _name_error(error: BaseException) -> str:
    """Return an error's type and the first line of its message: `ValueError: no`."""
    text = ""
    with suppress(Exception):  # a __str__ that raises
        text = _COLOURS.sub("", str(error)).strip().partition("\n")[0][:_LONG_LINE]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def write_ending(folder: Path, ending: Ending) -> None:
    """Write the record for the launcher, completely or not at all."""
    part = folder / f"ending-{ending.rank}.part"
    part.write_text(json.dumps(asdict(ending)), encoding="utf-8")
    os.replace(part, folder / f"ending-{ending.rank}.json")


def read_endings(folder: Path) -> list[Ending]:
    """Return all records in the launcher's folder, the earliest first."""
    endings = []
    for path in folder.glob("ending-*.json"):
        try:
            endings.append(Ending(**json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:  # the launcher is clearing up
            continue
    return sorted(endings, key=lambda ending: ending.time_s)


def find_cause(endings: list[Ending]) -> Ending | None:
    """Return the first failure that is not a consequence of another; None if no rank recorded one."""
    failed = [e for e in endings if e.kind == "error" or e.code not in (0, *ASKED_TO_STOP)]
    return next((e for e in failed if not e.follower), failed[0] if failed else None)


def may_follow(cause: Ending, logs: Iterable[str]) -> bool:
    """Return whether mismatched collectives, or another rank's end, may have caused an end."""
    # If gloo aborts one rank because of too many bytes, another rank got too few and may fail first.
    return cause.follower or cause.code == -signal.SIGABRT or any(map(_BYTES.search, logs))


ASKED_TO_STOP = (128 + signal.SIGINT, 128 + signal.SIGTERM, STOPPED)
"""Exit codes of ranks that stopped because they were asked to: by Ctrl-C, by SIGTERM, and the trainer's."""
