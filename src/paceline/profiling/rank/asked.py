"""Records steps of a rank, because its launcher or `paceline profile --pid` asked for it.

The ranks of a job that runs see the request at different times. So each first reports how many optimizer
steps it has taken. The requester then chooses a step ahead of all ranks, and each rank records from there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.launching.rank.import_hook import when_imported
from paceline.launching.rank.requests import write_whole
from paceline.memory.steps import STEPS
from paceline.profiling.rank.recorder import PASSING, RecordSettings, StepRecorder
from paceline.torch_seams.watching import BUFFER_SIZES

RECORD, ENTRY = "paceline.profiling.rank.asked:record", "paceline.profiling.rank.asked:answer"
# The entries of torch's Flight Recorder: those of some steps of FSDP over 80 layers.
_BUFFER_SIZE = "8000"
COUNTING, AHEAD, TOO_LATE, FAILED, DONE = "counting", "ahead", "too late", "failed", "done"
"""The states of a rank: it has no step to begin at yet, begins later or records, was beyond the step already,
could not record, or has written its file."""


class _Request:
    """A request, as a rank has it.

    Args:
        rank: global.
        folder: the launcher's.
        name: of the request.
    """

    def __init__(self, rank: int, folder: Path, name: str) -> None:
        self.name = name
        self._rank = rank
        self._path = folder / name_answer(rank)
        self._recorder: StepRecorder | None = None
        self._state = COUNTING

    def look(self, table: dict[str, Any]) -> None:
        """Begin if the step to begin at is known, and report the state."""
        if self._state == COUNTING and table["first"]:
            self._begin(table)
        reason = ""
        if self._recorder is not None:
            reason = self._recorder.failure
            self._state = FAILED if reason else DONE if self._recorder.is_done else AHEAD
        write_whole(
            self._path,
            {
                "request": self.name,
                "rank": self._rank,
                "state": self._state,
                "reason": reason,
                "count": STEPS.count,
                "time_s": time.monotonic(),
                "ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            },
        )

    def cancel(self) -> None:
        """Record no more."""
        if self._recorder is not None:
            self._recorder.cancel()

    def _begin(self, table: dict[str, Any]) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return  # the script has not imported it yet, and takes no step before
        if STEPS.count >= table["first"] - PASSING:
            self._state = TOO_LATE
            return
        settings = RecordSettings(**{**table["settings"], "after": table["first"] - PASSING})
        self._recorder = StepRecorder(self._rank, settings)
        self._recorder.install(torch)


_request: _Request | None = None


def record(rank: int, folder: Path, table: dict[str, Any]) -> None:
    """Record what the launcher asks for before the script's first line, which may never import torch."""
    keep_more_calls()
    when_imported("torch", StepRecorder(rank, RecordSettings(**table["settings"])).install)


def keep_more_calls() -> None:
    """Have torch's Flight Recorder keep the collectives of a recording; call it before the first group."""
    if not any(name in os.environ for name in BUFFER_SIZES):
        os.environ[BUFFER_SIZES[0]] = _BUFFER_SIZE


def answer(rank: int, folder: Path, table: dict[str, Any]) -> None:
    """Do what a request asks for, and leave an answer; called every second as long as there is one."""
    global _request
    if _request is None or _request.name != table["name"]:
        if _request is not None:
            _request.cancel()
        _request = _Request(rank, folder, table["name"])
    _request.look(table)


def name_answer(rank: int | str) -> str:
    """Return the name of a rank's answer in the launcher's folder; `*` stands for all ranks."""
    return f"answer-{rank}.json"
