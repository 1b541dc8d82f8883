"""Starts ranks on this machine and waits for them, on torchelastic's agent.

Who does what: the agent (torch's) starts the processes, hosts the store where they meet and notices
when one ends. `rank.py` runs around the function inside each. Here: what is checked before, how a
function gets into another process, signals, and one verdict at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from paceline.errors import PacelineError
from paceline.launch.failure import ASKED_TO_STOP, RankFailed, find_cause, read_endings
from paceline.launch.leftovers import ALIVE, launch_folder
from paceline.launch.rank import STOPPING, Job, run_rank
from paceline.place import is_launched

# What importing torch in a fresh process costs before any model (220 MB measured with gloo).
RANK_BYTES = 250_000_000
_RANKS_PER_CORE = 8
_PRELOAD = [
    "paceline.launch.own_session",
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "paceline.launch.rank"),
]
# `timeout` and some schedulers send a signal twice, to the process and to its group.
_SECOND_AFTER_S = 0.5
# torch reads some of these when it is imported, which the fork server did when it started.
_READ_AT_IMPORT = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "OMP", "MKL", "KMP", "LD_", "PYTHON")
_server_environ: dict[str, str] | None = None

StartMethod = Literal["forkserver", "spawn", "fork"]


def launch(
    fn: Callable[..., Any],
    nproc: int = 4,
    args: Sequence[Any] = (),
    *,
    device: str = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    stop_timeout_s: float = 60.0,
) -> list[Any]:
    """Runs `fn(*args)` on `nproc` ranks of this machine and gives what they return, by rank.

    `fn` calls `paceline.start()`, as it would under torchrun. A function of a module or of a script
    with an `if __name__ == "__main__"` guard gets a fresh process; one typed into a notebook or a shell
    is forked, which needs that this process has not used CUDA. Results are pickled. Ctrl-C and SIGTERM
    are passed to the ranks once; a second Ctrl-C kills them. If this process dies, so do the ranks.

    Args:
        fn: what every rank calls.
        nproc: number of ranks.
        args: its arguments, the same on every rank.
        device: `"cuda"` checks that there is a device for each rank.
        log_dir: folder for `rank-0000.log` and so on, each with all output of its rank; rank 0 writes
            to the terminal too, the others don't. Default: all ranks write where this process does.
        stop_timeout_s: how long ranks that were asked to stop may take, to save for example.

    Raises:
        PacelineError: PL320 to PL326 for what can't be started; or a rank's own error, as it was
            on the rank that failed first.
        RankFailed: a rank failed by anything else; it names the first one, with its traceback.
        SystemExit: the ranks stopped because they were asked to (130 for Ctrl-C, 143 for SIGTERM).
    """
    check_launch(nproc, device)
    method, payload = _choose_start(fn, tuple(args))
    with ExitStack() as stack:
        folder = stack.enter_context(launch_folder())
        alive = stack.enter_context(_alive_pipe(folder))
        job = Job(
            payload=payload,
            environ=dict(os.environ),
            path=list(sys.path),
            folder=str(folder),
            log_dir=None if log_dir is None else str(_make_log_dir(log_dir)),
            forked=method == "fork",
            alive_fd=alive,
        )
        return _run(job, nproc, method, folder, stop_timeout_s)


def check_launch(nproc: int, device: str = "auto") -> None:
    """Raises PL320 to PL323 and PL325 for ranks that this process can't start on this machine."""
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise PacelineError(
            "PL320",
            saw=f"nproc={nproc!r}.",
            rule="The number of ranks is a whole number from 1.",
            fix="Use for example nproc=2.",
        )
    import multiprocessing

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise PacelineError(
            "PL325",
            saw="launch() was called while a rank was importing your script.",
            rule="Every rank imports the script to find the function, so the call must not run at import.",
            fix='Put the call under: if __name__ == "__main__":',
        )
    if is_launched(os.environ):
        raise PacelineError(
            "PL323",
            saw="This process is already one of several ranks "
            f"(RANK={os.environ.get('RANK') or os.environ.get('SLURM_PROCID', '?')}).",
            rule="torchrun, srun or mpirun has started the ranks, and ranks don't start ranks.",
            fix="Call the function itself, or start this script with plain python.",
        )
    _check_room(nproc, device)


def _check_room(nproc: int, device: str) -> None:
    import psutil
    import torch

    from paceline.place import usable_cores

    if device == "cuda" and nproc > torch.cuda.device_count():
        raise PacelineError(
            "PL322",
            saw=f'nproc={nproc} with device="cuda", and this machine shows {torch.cuda.device_count()} '
            "CUDA devices.",
            rule="Each rank needs a device of its own.",
            fix='Start as many ranks as there are devices, or use device="cpu".',
        )
    cores = usable_cores()
    if nproc > _RANKS_PER_CORE * cores:
        raise PacelineError(
            "PL321",
            saw=f"nproc={nproc} on {cores} usable cores.",
            rule=f"More than {_RANKS_PER_CORE} ranks per core would only wait for each other.",
            fix=f"Use at most nproc={_RANKS_PER_CORE * cores} here.",
        )
    available = psutil.virtual_memory().available
    if nproc * RANK_BYTES > available:
        raise PacelineError(
            "PL321",
            saw=f"nproc={nproc}, and {available / 1e9:.1f} GB of memory are available.",
            rule=f"A rank takes about {RANK_BYTES / 1e6:.0f} MB before it holds any model.",
            fix=f"Use at most nproc={max(1, available // RANK_BYTES)} here.",
        )


# ---- how a function gets into another process


def _choose_start(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[StartMethod, bytes | tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Fresh processes where the function can be found by name, forks of this one where it can't."""
    try:
        payload = pickle.dumps((fn, args))
        trouble = "it is defined in a notebook, in a shell or on standard input"
        if b"__main__" not in payload or _main_is_importable():
            return _fresh_method(), payload
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        trouble = str(error)
    import torch

    name = getattr(fn, "__qualname__", repr(fn))
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if uses_cuda or not hasattr(os, "fork"):
        raise PacelineError(
            "PL324",
            saw=f"{name} can't be sent to another process ({trouble}), and "
            + ("this process uses CUDA already." if uses_cuda else "this system has no fork."),
            rule="Such a function is reached by forking this process, and CUDA does not survive a fork.",
            fix="Put the function into a module and import it, or call launch() before CUDA is first used.",
        )
    return "fork", (fn, args)


def _main_is_importable() -> bool:
    """Whether a fresh process can run the main module's file again, as multiprocessing does."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        # multiprocessing doesn't import a package's __main__.py again.
        return not main.__spec__.name.endswith("__main__")  # type: ignore[union-attr]
    return os.path.isfile(getattr(main, "__file__", None) or "")


def _fresh_method() -> StartMethod:
    """Forks of a server that has torch loaded; cold processes where the server would be out of date."""
    global _server_environ
    if sys.platform != "linux":
        return "spawn"
    now = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    if _server_environ is None:
        _server_environ = now
    return "forkserver" if now == _server_environ else "spawn"


@contextmanager
def _main_without_file() -> Iterator[None]:
    """Hides the `<stdin>` that multiprocessing would take for a script's path."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.isfile(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


# ---- running


def _run(job: Job, nproc: int, method: StartMethod, folder: Path, stop_timeout_s: float) -> list[Any]:
    # These take a second to import, and only a launcher needs them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if method == "forkserver":
        import multiprocessing
        from multiprocessing import resource_tracker

        multiprocessing.set_forkserver_preload(_PRELOAD)
        # It ignores Ctrl-C and SIGTERM by itself, but a closing terminal would end it before the ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            resource_tracker.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": nproc,
        "run_id": uuid.uuid4().hex,
        "role": "paceline",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "start_method": method,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "torchelastic")),
        "shutdown_timeout": max(1, round(stop_timeout_s)),
        "signals_to_handle": "",  # `_signals` does
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older torch has fewer
    extra = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings["shutdown_timeout"]),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
        # Counting CUDA devices the other way would spoil CUDA in forked ranks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    try:
        with _environment(extra), _quiet_torchelastic(), _signals(folder), _main_without_file():
            config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
            results = elastic_launch(config, run_rank)(job)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _raise_failure(folder, rank, failure.exitcode)
    except SignalException as error:
        cause = find_cause(read_endings(folder))
        if cause is not None and not cause.follower:
            _raise_failure(folder, cause.rank, cause.code)
        raise SystemExit(128 + error.sigval) from None
    stopped = [ending.code for ending in read_endings(folder) if ending.code in ASKED_TO_STOP]
    if stopped:
        raise SystemExit(stopped[0])
    return [pickle.loads(results[rank]) for rank in range(nproc)]


def _raise_failure(folder: Path, rank: int, status: int) -> NoReturn:
    """One error for the whole launch: that of the rank that failed first."""
    cause = find_cause(read_endings(folder))
    if cause is None or (cause.follower and status < 0):
        hint = ""
        if _lives(folder, rank):
            hint = (
                "Its process lives on: the server that ranks are forked from was killed. The ranks notice "
                "that this process has gone, save and leave."
            )
        elif status >= 0 and not (folder / f"began-{rank}").exists():
            hint = (
                "It ended before it reached the function: a script that calls launch() needs the line "
                'if __name__ == "__main__": above the call.'
            )
        raise RankFailed(rank, status, hint=hint) from None
    ours = cause.error()
    if ours is not None:
        raise ours from None
    raise RankFailed(cause.rank, cause.code, cause.trace) from None


def _lives(folder: Path, rank: int) -> bool:
    import psutil

    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        process = psutil.Process(int((folder / f"began-{rank}").read_text()))
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextmanager
def _alive_pipe(folder: Path) -> Iterator[int]:
    """A named pipe that reads as ended once this process has gone, whatever ended it."""
    path = folder / ALIVE
    os.mkfifo(path)
    # Opened for both, because opening for writing alone waits for a reader.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _signals(folder: Path) -> Iterator[None]:
    """Passes the first Ctrl-C or SIGTERM on to the ranks by way of the agent; a second Ctrl-C kills them."""
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    asked_s: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if asked_s is not None:
            if number == signal.SIGINT and time.monotonic() - asked_s > _SECOND_AFTER_S:
                _kill_ranks(folder)
            return
        asked_s = time.monotonic()
        (folder / STOPPING).touch()
        # A closed terminal asks for the same as SIGTERM: save and leave.
        wish = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        raise SignalException(f"got {wish.name}", sigval=wish)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # nohup stays immune to hang-ups. An ignored SIGINT is taken all the same, as torchrun does: shells
        # ignore it for every background job, and whoever sends it by hand means it.
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _kill_ranks(folder: Path) -> None:
    for path in folder.glob("began-*"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Silences the agent's log lines: `launch` tells the same, once and with the cause."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(names) and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; `_choose_start` says when that is right.
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            yield
    finally:
        for logger in loggers:
            logger.disabled = False


def _make_log_dir(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks run anywhere that the function changes to.
        return folder.resolve(strict=True)
    except OSError as error:
        raise PacelineError(
            "PL326",
            saw=f"log_dir={str(folder)!r} can't be made: {error.strerror}.",
            rule="Each rank writes its log there.",
            fix="Choose a folder that you may write to.",
        ) from None
