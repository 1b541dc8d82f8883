"""Starts ranks on this machine for a function and waits for them, with torchelastic's agent.

torch's agent assigns numbers to ranks, hosts the store where they meet and detects when one ends
(`agent.py`). The keeper starts them (`keeper.py`), and `call.py` wraps the function in each rank. This file
runs the checks before, sends the function to the other processes, and raises one verdict at the end.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import resource
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launching import watcher as watching_module
from paceline.launching.job import Job, watching
from paceline.launching.processes.folder import launch_folder
from paceline.launching.processes.keeper_messages import Start
from paceline.launching.processes.ranks import (
    RankHandler,
    Ranks,
    fork_keeper_for_call,
    spawn_keeper,
)
from paceline.launching.processes.streams import Pump, open_streams
from paceline.launching.rank.call import RankCall, prepare_main
from paceline.launching.stop import stop_by_signals
from paceline.launching.verdict import judge
from paceline.launching.warm.import_environment import READ_AT_IMPORT
from paceline.launching.watcher import HANG_AFTER_S, Watcher
from paceline.place import is_launched, note_grace, read_grace_s
from paceline.signatures import explain_arguments

# Memory of a fresh process after it has imported torch, before any model (220 MB measured with gloo).
RANK_BYTES = 250_000_000
_RANKS_PER_CORE = 8
# Open files: with 2 ranks 40 are enough and 34 are not; the launcher needs some for each additional rank.
_FILES, _FILES_PER_RANK = 48, 8
# After a rank has failed, the others get this long to end before they are killed. torchelastic waits 30 s.
_STUCK_S = 5.0
_SIGNALS = "SIGTERM,SIGINT,SIGHUP"
# torch reads these variables when it is imported, which the keeper did when it started.
_READ = sorted(set().union(*READ_AT_IMPORT.values()))


@explain_arguments
def launch(
    fn: Callable[..., Any],
    nproc: int = 4,
    args: Sequence[Any] = (),
    *,
    log_dir: str | os.PathLike[str] | None = None,
    stop_timeout_s: float = 60.0,
    hang_after_s: float | None = HANG_AFTER_S,
    watcher: Watcher | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` ranks of this machine, and return their results by rank.

    `fn` calls `paceline.start()`, as it would under torchrun. A function of a module, or of a script
    with an `if __name__ == "__main__"` guard, runs in fresh processes. A function typed into a notebook or a
    shell runs in forks of this process, which must not have used CUDA. Results are pickled. Ctrl-C and
    SIGTERM are passed to the ranks once; a second Ctrl-C kills them. If this process dies, the ranks end too.

    Args:
        fn: the function that every rank calls.
        nproc: number of ranks.
        args: its arguments, the same on every rank.
        log_dir: folder for `rank-0000.log` and so on, each with all output of its rank; only rank 0 also
            writes to the terminal. Default: all ranks write to this process's streams.
        stop_timeout_s: seconds that ranks may take to end after a stop signal, for example to save.
        hang_after_s: seconds without any sign of work on any rank after which waiting ranks count as hanging;
            ten times as long if a rank computes. None: the ranks are not watched.
        watcher: watches the ranks in place of the default watcher.

    Raises:
        JobStuck: if the ranks hang, or their collectives do not match.
        PacelineError: PL320 to PL326 and PL349 if ranks cannot be started; or the error of the rank that
            failed first.
        RankFailed: if a rank failed with any other error; it names the first one, with its traceback.
        SystemExit: if the ranks stopped on a signal (130 for Ctrl-C, else 75).
    """
    check_launch(nproc)
    watcher = watcher or _choose_watcher(hang_after_s)
    call = _choose_call(fn, tuple(args))
    logs = None if log_dir is None else _make_log_dir(log_dir)
    ranks = fork_keeper_for_call(call) if call.is_forked else _take_keeper()
    copier = None if logs is None else Pump()
    try:
        with launch_folder() as folder:
            job = FunctionJob(
                folder=folder,
                pump=copier,
                watcher=watcher,
                call=call,
                logs=logs,
                grace_s=min(stop_timeout_s, read_grace_s(os.environ) or stop_timeout_s),
            )
            return _run(job, ranks, nproc, stop_timeout_s)
    finally:
        if copier is not None:
            copier.close()
        if call.is_forked:
            ranks.finish(kills=True)


def _choose_watcher(hang_after_s: float | None) -> Watcher | None:
    if hang_after_s is None or watching_module.build_default is None:
        return None
    if not hang_after_s > 0:
        raise PacelineError(
            "PL349",
            saw=f"hang_after_s={hang_after_s!r}.",
            rule="It is the number of seconds for which ranks may make no progress.",
            fix=f"Leave it out for {HANG_AFTER_S:g}, or turn the watch off with hang_after_s=None.",
        )
    return watching_module.build_default(hang_after_s)


def check_launch(nproc: int) -> None:
    """Raise PL320, PL321, PL323, PL325 and PL605 for ranks that this process cannot start on this machine."""
    if nproc < 1:
        raise PacelineError(
            "PL320",
            saw=f"nproc={nproc!r}.",
            rule="The number of ranks is a whole number of at least 1.",
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
            rule="torchrun, srun or mpirun has started the ranks, and a rank cannot start ranks.",
            fix="Call the function itself, or start this script with plain python.",
        )
    _check_room(nproc)


def _check_room(nproc: int) -> None:
    import psutil

    from paceline.place import usable_cores

    cores = usable_cores()
    if nproc > _RANKS_PER_CORE * cores:
        raise PacelineError(
            "PL321",
            saw=f"nproc={nproc} on {cores} usable cores.",
            rule=f"More than {_RANKS_PER_CORE} ranks per core mostly wait for each other.",
            fix=f"Use at most nproc={_RANKS_PER_CORE * cores} here.",
        )
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + _FILES_PER_RANK * nproc
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise PacelineError(
            "PL605",
            saw=f"nproc={nproc}, and a process may have {limit} open files here.",
            rule="The launcher and the ranks hold files, pipes and connections open.",
            fix=f"Raise the limit in this shell: ulimit -n {max(1024, needed)}.",
        )
    available = psutil.virtual_memory().available
    if nproc * RANK_BYTES > available:
        raise PacelineError(
            "PL321",
            saw=f"nproc={nproc}, and {available / 1e9:.1f} GB of memory are available.",
            rule=f"A rank takes about {RANK_BYTES / 1e6:.0f} MB before it holds any model.",
            fix=f"Use at most nproc={max(1, available // RANK_BYTES)} here.",
        )


# ---- sending a function to another process


def _choose_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> RankCall:
    """Choose fresh processes if the function can be imported by name, else forks of this process."""
    try:
        payload = pickle.dumps((fn, args))
        trouble = "it is defined in a notebook, in a shell or on standard input"
        if b"__main__" not in payload or _main_is_importable():
            return RankCall(payload, prepare_main(needs_main=b"__main__" in payload))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        trouble = str(error)
    import torch

    name = getattr(fn, "__qualname__", repr(fn))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise PacelineError(
            "PL324",
            saw=f"{name} cannot be sent to another process ({trouble}), and this process uses CUDA already.",
            rule="Ranks get such a function by a fork of this process, and CUDA does not survive a fork.",
            fix="Put the function into a module and import it, or call launch() before CUDA is first used.",
        )
    return RankCall((fn, args))


def _main_is_importable() -> bool:
    """Return whether a fresh process can run the main module's file again, as multiprocessing does."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        # multiprocessing does not import a package's __main__.py again.
        return not main.__spec__.name.endswith("__main__")  # type: ignore[union-attr]
    return os.path.isfile(getattr(main, "__file__", None) or "")


# The keeper of this process, kept for the next launch, and the environment that it has imported torch in.
_keeper: tuple[Ranks, int, dict[str, str]] | None = None


def warm_up() -> None:
    """Start the process that ranks are forked from; it imports torch in the background."""
    global _keeper
    if _keeper is None:
        atexit.register(_end_idle_keeper)
    now = {name: os.environ[name] for name in _READ if name in os.environ}
    if _keeper is not None:
        ranks, owner, environ = _keeper
        if owner == os.getpid() and environ == now and not ranks.keeper_died:
            return
        if owner == os.getpid():
            ranks.finish(kills=False)
    _keeper = spawn_keeper(), os.getpid(), now


def _end_idle_keeper() -> None:
    """End a keeper that this process has not used, instead of letting it import torch to the end."""
    if _keeper is not None and _keeper[1] == os.getpid():
        _keeper[0].abandon()


def _take_keeper() -> Ranks:
    warm_up()
    assert _keeper is not None
    return _keeper[0]


# ---- running


@dataclass(kw_only=True)
class FunctionJob(Job):
    """One launch of a function.

    Attributes:
        call: the function for every rank.
        grace_s: seconds that ranks have after a stop signal.
    """

    is_program = False

    call: RankCall
    grace_s: float

    def may_be_stuck_s(self) -> float | None:
        """Return the seconds that a rank may take to end: few after a failure, `None` after a stop signal."""
        return _STUCK_S if self.rounds.asked is None else None

    def build_start(
        self, *, env: dict[str, str], local_rank_id: int, **wishes: Any
    ) -> tuple[Start, tuple[int, int]]:
        """Build the keeper's message for a rank that torchelastic starts, and open its stdout and stderr."""
        rank = int(env["RANK"])
        log = "" if self.logs is None else str(self.logs / f"rank-{rank:04d}.log")
        folder = str(self.folder)
        # A forked keeper already has the function, which cannot be pickled.
        entry = RankCall(b"") if self.call.is_forked else self.call
        watch = self.watcher.entry if self.watcher is not None else ""
        environ = {**os.environ, **env}
        note_grace(environ, self.grace_s)
        start = Start(local_rank_id, rank, environ, (), entry, log, folder, folder, watch)
        return start, open_streams(self.pump, "", "", log, shows=rank == 0, persists=True)


def _run(job: FunctionJob, ranks: Ranks, nproc: int, stop_timeout_s: float) -> list[Any]:
    # These imports are slow, and only a launcher needs them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from paceline.launching.elastic.agent import quiet_torchelastic, run_agent, start_thread
    from paceline.launching.elastic.rendezvous import ONE_NODE

    patience_s = max(1, round(stop_timeout_s))
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": nproc,
        "run_id": uuid.uuid4().hex,
        "role": "paceline",
        "rdzv_backend": ONE_NODE,
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(job.folder / "torchelastic")),
        "shutdown_timeout": patience_s,
    }
    known = {entry.name for entry in dataclasses.fields(LaunchConfig)}  # older torch has fewer
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
    build = partial(RankHandler, ranks, job.build_start, job.may_be_stuck_s)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            run_agent(config, "paceline.launch", [], build, ranks, job.rounds)
        except BaseException as error:
            outcome.append(error)

    try:
        stopping = stop_by_signals(_SIGNALS, patience_s, job.rounds, ranks, hangup=signal.SIGTERM)
        watched = watching(job.watcher, job.folder, ranks, job.rounds)
        with stopping as stop, quiet_torchelastic(), watched:
            stop.supervise(start_thread(work), job.pump, job.watcher)
        judge(job, ranks, outcome[0] if outcome else None, stop)
        return [pickle.loads((job.folder / f"result-{rank}").read_bytes()) for rank in range(nproc)]
    finally:
        if job.pump is not None:
            job.pump.drain()
        ranks.sweep(kills=True)


def _make_log_dir(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Make it absolute: the function may change the working directory.
        return folder.resolve(strict=True)
    except OSError as error:
        raise PacelineError(
            "PL326",
            saw=f"log_dir={str(folder)!r} cannot be made: {error.strerror}.",
            rule="Each rank writes its log there.",
            fix="Choose a folder with write permission.",
        ) from None
