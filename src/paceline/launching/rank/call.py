"""The code that runs inside a rank that `launch` started, around the user's function.

It leaves word in the launcher's folder: `began-N` with its process's number, `result-N` with the pickled
result, `ending-N.json` where it failed or was asked to stop (`failure.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any, NoReturn

from paceline.launching.ending.endings import (
    ASKED_TO_STOP,
    describe_ending,
    find_cause,
    read_endings,
    write_ending,
)
from paceline.launching.rank.openblas import set_openblas_threads
from paceline.launching.watcher import NoteError, ignore_error

# How long a follower waits for the rank that failed first to write its record.
_CAUSE_S = 3.0


@dataclass(frozen=True)
class RankCall:
    """A function for every rank.

    Attributes:
        payload: the pickled function and arguments; these themselves where ranks are forks of the launcher.
        preparation: what multiprocessing needs to import the launcher's main module again.
    """

    payload: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    preparation: dict[str, Any] = field(default_factory=dict)

    @property
    def is_forked(self) -> bool:
        """Whether the rank is a fork of the launcher itself, with all that it has loaded."""
        return not isinstance(self.payload, bytes)


def prepare_main(*, needs_main: bool) -> dict[str, Any]:
    """Return the data that a fresh process needs to find functions, including the main module's."""
    data = spawn.get_preparation_data("rank")
    names = ["sys_path", "sys_argv", "orig_dir", "dir"]
    if needs_main:
        names += ["init_main_from_name", "init_main_from_path"]
    return {name: data[name] for name in names if name in data}


def run_call(
    call: RankCall, rank: int, folder: Path, log: str, note_error: NoteError = ignore_error
) -> NoReturn:
    """Call the user's function as one rank, and end the process as multiprocessing ends its own."""
    code = 1
    try:
        code = _run(call, rank, folder, bool(log), note_error)
        util._exit_function()  # type: ignore[attr-defined]
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a closed or broken stream must not hide the result
                stream.flush()
        os._exit(code)


def _run(call: RankCall, rank: int, folder: Path, is_logged: bool, note_error: NoteError) -> int:
    (folder / f"began-{rank}").write_text(str(os.getpid()))
    _settle(call, rank, folder)
    try:
        if isinstance(call.payload, bytes):
            _import_main(call.preparation)
            fn, args = pickle.loads(call.payload)
        else:
            fn, args = call.payload
        result = pickle.dumps(fn(*args))
    except BaseException as error:
        note_error(error)
        ending = describe_ending(rank, error)
        if ending.kind == "exit" and ending.code == 0:
            result = pickle.dumps(None)
        else:
            write_ending(folder, ending)
            if ending.kind == "exit" and ending.code in ASKED_TO_STOP:
                return 0  # a good end, which the launcher recognises by the record
            if is_logged and not ending.pickled:
                sys.stderr.write(ending.trace)
            if ending.follower:
                _await_cause(folder)
            return ending.code
    finally:
        # torch's loader raises in this handler when a worker that was forked here is killed, and
        # multiprocessing now kills the workers that are left.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    part = folder / f"result-{rank}.part"
    part.write_bytes(result)
    part.rename(folder / f"result-{rank}")
    return 0


def _settle(call: RankCall, rank: int, folder: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if call.is_forked:
        _forget_parent_threads()
        return
    set_openblas_threads()
    # Loader workers come from a fork server of this rank. A fork of the rank itself can hang in Python 3.11:
    # it waits for a lock that a thread of gloo held at the time of the fork.
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["paceline.data.fetching"])


def _import_main(preparation: dict[str, Any]) -> None:
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # as multiprocessing sets it: `check_launch` reads it
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting


def _forget_parent_threads() -> None:
    """Use one thread: a fork has the parent's locks but not its OpenMP threads, so several would hang."""
    import torch

    from paceline import world

    world.FORKED = True
    torch.set_num_threads(1)


def _await_cause(folder: Path) -> None:
    deadline = time.monotonic() + _CAUSE_S
    while time.monotonic() < deadline:
        cause = find_cause(read_endings(folder))
        if cause is not None and not cause.follower:
            return
        time.sleep(0.05)
