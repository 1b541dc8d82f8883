"""What runs inside a rank that `launch` started, around the user's function.

Protocol with the launcher, all of it in one temporary folder:

- `alive` is a named pipe whose writing end the launcher holds. When it closes, the launcher is gone,
  however it died, and the rank ends: SIGTERM to itself, SIGKILL ten seconds later.
  (PR_SET_PDEATHSIG doesn't serve: a rank's parent is the fork server, not the launcher.)
- `stopping` says that the launcher has been asked to stop and has passed that on.
- `began-N` says that rank N has reached its function, `ending-N.json` how it ended (`failure.py`).
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.failure import ASKED_TO_STOP, describe_ending, find_cause, read_endings, write_ending
from paceline.launch.leftovers import ALIVE

# Set per rank by torchelastic's agent; everything else comes from the launcher's environment.
_OF_THE_AGENT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
STOPPING = "stopping"
_LAUNCHER_GONE_S = 10.0
# How long a rank may be stuck after another one has failed. The agent itself would wait for 30 s.
_PEER_FAILED_S = 5.0
# How long a follower waits for the rank that failed first to put its record down.
_CAUSE_S = 3.0
_launcher_gone = threading.Event()


@dataclass(frozen=True)
class Job:
    """What the launcher gives to every rank.

    Attributes:
        payload: the pickled function and arguments, or the function and arguments where forked.
        environ: the launcher's environment.
        path: the launcher's `sys.path`.
        folder: where launcher and ranks leave word.
        log_dir: where each rank's output goes, or None.
        forked: whether the rank is a fork of the launcher.
        alive_fd: the launcher's end of `alive`, which a forked rank inherits and must close.
    """

    payload: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    environ: Mapping[str, str]
    path: list[str]
    folder: str
    log_dir: str | None
    forked: bool
    alive_fd: int


def run_rank(job: Job) -> bytes | None:
    """Calls the user's function as one rank; returns its pickled result, None where it was asked to stop."""
    # The terminal's Ctrl-C goes to the launcher, which passes it on once.
    with suppress(PermissionError):  # already the leader of a session
        os.setsid()
    _keep_parent_death_quiet()
    if job.forked:
        os.close(job.alive_fd)
        _forget_parent_threads()
    # Loader workers come from a fork server of this rank, multiprocessing's default in its child. A fork
    # of the rank itself can hang in Python 3.11: it waits for a lock that a thread of gloo held just then.
    multiprocessing.set_forkserver_preload(["paceline.data.fetching"])
    _take_environment(job)
    folder, rank = Path(job.folder), int(os.environ["RANK"])
    (folder / f"began-{rank}").write_text(str(os.getpid()))
    threading.Thread(target=_watch, args=(folder, rank), name="paceline-watch", daemon=True).start()
    output = _Output(job.log_dir, rank) if job.log_dir is not None else None
    try:
        fn, args = pickle.loads(job.payload) if isinstance(job.payload, bytes) else job.payload
        return pickle.dumps(fn(*args))
    except BaseException as error:
        ending = describe_ending(rank, error)
        if ending.kind == "exit" and ending.code == 0:
            return pickle.dumps(None)
        write_ending(folder, ending)
        if ending.kind == "exit" and ending.code in ASKED_TO_STOP:
            # A good end. While the agent is closing down it waits for the process to leave; at other
            # times it would take a leaving process for a failure and turn on the others.
            if (folder / STOPPING).exists() or _launcher_gone.is_set():
                raise SystemExit(ending.code) from None
            return None
        if output is not None and not ending.pickled:
            sys.stderr.write(ending.trace)
        if ending.follower:
            _await_cause(folder)
        raise SystemExit(ending.code) from None
    finally:
        # Torch's loader has it raise when a worker that was forked here is killed, and multiprocessing now
        # kills those that are left.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a closed or broken stream must not hide the result
                stream.flush()
        if output is not None:
            output.close()


def _take_environment(job: Job) -> None:
    """The fork server may be older than the launcher's present environment: take that one."""

    def agents(name: str) -> bool:
        return name in _OF_THE_AGENT or name.startswith("TORCHELASTIC_")

    for name in [name for name in os.environ if name not in job.environ and not agents(name)]:
        del os.environ[name]
    for name, value in job.environ.items():
        if not agents(name):
            os.environ[name] = value
    sys.path[:] = job.path


def _keep_parent_death_quiet() -> None:
    """Undoes torch's PR_SET_PDEATHSIG (SIGINT): `_watch` does it for every way of starting."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, 0)


def _forget_parent_threads() -> None:
    """A fork has the parent's locks but not its OpenMP threads: computing with several would hang."""
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


def _watch(folder: Path, rank: int) -> None:
    """Ends this rank when the launcher has gone, or when it is stuck after another rank's failure."""
    pipe = -1
    with suppress(FileNotFoundError):  # the launcher is gone and has cleared up already
        pipe = os.open(folder / ALIVE, os.O_RDONLY | os.O_NONBLOCK)
    while pipe >= 0:
        try:
            if not os.read(pipe, 1):
                break
        except BlockingIOError:
            pass
        select.select([pipe], [], [], 1.0)
        cause = find_cause([e for e in read_endings(folder) if e.rank != rank])
        if cause is not None and time.time() - cause.time_s > _PEER_FAILED_S:
            os.kill(os.getpid(), signal.SIGKILL)
    _launcher_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAUNCHER_GONE_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _Output:
    """Sends this rank's stdout and stderr, as file descriptors, to its log; rank 0's to the terminal too.

    Rank 0's goes through a small process of its own (`tee.py`), which survives the rank and so writes
    its last words. Where rank 0 writes to a terminal it gets a pseudo-terminal, so that progress bars work.
    """

    def __init__(self, log_dir: str, rank: int) -> None:
        log = os.path.join(log_dir, f"rank-{rank:04d}.log")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._saved = (os.dup(1), os.dup(2))
        self._tee: subprocess.Popen[bytes] | None = None
        if rank > 0:
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.close(target)
        else:
            self._start_tee(log)
        sys.stdout, sys.stderr = _as_text(sys.stdout, 1), _as_text(sys.stderr, 2)

    def _start_tee(self, log: str) -> None:
        reads, writes = zip(*(_pipe_like(fd) for fd in self._saved), strict=True)
        script = Path(__file__).with_name("tee.py")
        pairs = [f"{read}:{saved}" for read, saved in zip(reads, self._saved, strict=True)]
        self._tee = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), log, *pairs],
            pass_fds=(*reads, *self._saved),
            start_new_session=True,
        )
        for number, fd in enumerate(writes, start=1):
            os.dup2(fd, number)
        for fd in (*reads, *writes):
            os.close(fd)

    def close(self) -> None:
        """Gives the descriptors back and waits until everything has been written."""
        for number, fd in enumerate(self._saved, start=1):
            os.dup2(fd, number)
            os.close(fd)
        if self._tee is not None:
            with suppress(subprocess.TimeoutExpired):  # a child of the rank may hold the pipe open
                self._tee.wait(2)


def _pipe_like(target: int) -> tuple[int, int]:
    """A pipe to what shall reach `target`, or a pseudo-terminal of its size where that is a terminal."""
    if not os.isatty(target):
        return os.pipe()
    read, write = os.openpty()
    tty.setraw(write)  # the real terminal does the translating
    termios.tcsetwinsize(write, termios.tcgetwinsize(target))
    return read, write


def _as_text(stream: Any, fd: int) -> Any:
    """A line-buffered text stream on `fd`: what a killed rank has printed must be in its log."""
    if isinstance(stream, io.TextIOWrapper) and stream.fileno() == fd:
        stream.reconfigure(line_buffering=True)
        return stream
    return open(fd, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
