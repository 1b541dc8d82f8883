"""Runs a script on the ranks of this node, for `paceline run`.

The order matters, because ranks are forks of forks of this process. First the flags are read without torch,
and the pump is forked while this process is small. Then torch is imported, and the keeper is forked. Only
then torchelastic starts, with its threads. From there on the main thread only waits and passes signals on.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.launching.elastic.network import choose_rendezvous, describe_place, read_place
from paceline.launching.job import ScriptJob, watching
from paceline.launching.processes.folder import launch_folder
from paceline.launching.processes.ranks import RankHandler, Ranks, fork_keeper
from paceline.launching.processes.streams import Pump
from paceline.launching.rank.script import Become, Script, check_script
from paceline.launching.stop import raise_on_signals, read_patience_s, stop_by_signals
from paceline.launching.verdict import (
    find_missing_files,
    judge,
    log_restart,
    may_be_consequence,
    refuse_lost_output,
)
from paceline.launching.warm.sources import choose_modules, find_settings, find_shadowed, may_load_ahead
from paceline.launching.warm.warm import Warmth, why_not_fork
from paceline.launching.watcher import Watcher, ignore_error
from paceline.place import RankPlace, check_interfaces, note_grace, read_grace_s, usable_cores

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger(__name__)

# For these values, torch counts the devices.
_DEVICES = ("auto", "gpu", "xpu")
_COUNT_S = 120.0
_FIRST = ("torch", "torch.distributed")


def run_script(
    flags: argparse.Namespace,
    *,
    cold: bool = False,
    threads: int | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Run a script (or a program) under torchelastic's agent until all ranks have ended.

    Args:
        flags: torchrun's (`flags.py`); modified.
        cold: whether every rank starts its own Python, as under torchrun.
        threads: for OMP_NUM_THREADS; None: the environment's value, else cores / ranks of this node.
        watcher: the watcher of the ranks; it sees a program, or another Python, only from outside.

    Raises:
        RankFailed: if a rank failed.
        JobStuck: if the watcher has found that the ranks cannot continue.
        Interrupted: if the job was asked to stop.
        Become: in a rank.
    """
    script = _read_script(flags)
    check_interfaces(os.environ)
    place = read_place(flags, os.environ)
    if place.launcher != "single":
        _join(flags, script, place, threads)
    with raise_on_signals() as check_signals:
        choose_rendezvous(flags, place, os.environ)
        flags.nproc_per_node = _count_ranks(flags.nproc_per_node)
        _set_threads(int(flags.nproc_per_node), threads)
        _set_grace(flags)
        pump = Pump()
        ranks: Ranks | None = None
        try:
            ranks, is_warm = _warm_up(flags, script, pump, cold)
            with launch_folder() as folder:
                logs, keeps_logs = _make_logs(flags)
                job = ScriptJob(
                    folder=folder,
                    pump=pump,
                    watcher=watcher,
                    flags=flags,
                    script=script,
                    logs=logs,
                    keeps_logs=keeps_logs,
                    is_warm=is_warm,
                )
                _run(job, ranks, check_signals)
        except Become:  # this process is a rank, which prints through the pump
            raise
        except BaseException:
            pump.close()
            if ranks is not None:
                ranks.abandon()
            raise
        pump.close()


def _warm_up(flags: argparse.Namespace, script: Script | None, pump: Pump, cold: bool) -> tuple[Ranks, bool]:
    """Import torch and fork the keeper; return the ranks to start, and whether they start warm.

    Raises:
        Become: in ranks. Open contexts then end in the rank too.
    """
    reason = _why_cold(flags, script, cold)
    warmth: Warmth | None = None
    load: list[str] = []
    if not reason and script is not None:
        warmth = Warmth()
        load = [name for name in choose_modules(script) if name not in _FIRST]
        if not may_load_ahead(script):
            load = []
        warmth.load(_FIRST)
        shadowed = ", ".join(find_shadowed(script))
        if shadowed:
            reason = f"{shadowed} is beside the script, and torch has loaded another module of that name"
        else:
            reason = why_not_fork() or ""
    if reason and not cold and script is not None:
        log.warning("the ranks start cold, as under torchrun: %s", reason)
    return fork_keeper(pump, None if reason else warmth, load), not reason


# ---- before


def _read_script(flags: argparse.Namespace) -> Script | None:
    if flags.no_python:
        return None
    script = Script(flags.training_script, tuple(flags.training_script_args), bool(flags.module))
    check_script(script)
    return script


def _join(flags: argparse.Namespace, script: Script | None, place: RankPlace, threads: int | None) -> None:
    """Turn this process into the script, as one of the ranks that torchrun, srun or mpirun started.

    Return if each of their tasks is the launcher of its node instead, as `--nproc-per-node` requests.
    """
    if place.launcher != "torchrun" and flags.nproc_per_node is not None:
        if place.local_world_size > 1:
            raise PacelineError(
                "PL348",
                saw=f"--nproc-per-node {flags.nproc_per_node} in {place.local_world_size} tasks on one node.",
                rule="Each task would start that many ranks on the same node.",
                fix="Start one task per node (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or "
                "leave --nproc-per-node out: then each task is a rank.",
            )
        _refuse_same_node_rank(flags, place)
        return
    if place.launcher != "torchrun":
        os.environ.update(describe_place(place))
    cores = place.cores_per_rank or usable_cores() // place.local_world_size
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, cores))
    if script is None:
        os.execvp(flags.training_script, [flags.training_script, *flags.training_script_args])
    if place.rank == 0:
        log.info("this process is rank 0 of %d, as the environment says", place.world_size)
    raise Become(script, None, lambda: ignore_error)


def _refuse_same_node_rank(flags: argparse.Namespace, place: RankPlace) -> None:
    """Raise PL363 if this node has the number 0 too: the batch script has replaced $SLURM_NODEID."""
    is_static = (
        flags.rdzv_backend == "static" and not flags.standalone and flags.nnodes not in (None, "1", "1:1")
    )
    if is_static and flags.node_rank == 0 and place.node_rank > 0:
        raise PacelineError(
            "PL363",
            saw=f"--node-rank 0 on node {place.node_rank} of {place.num_nodes}.",
            rule="A batch script replaces $SLURM_NODEID before srun starts the tasks, so all nodes get 0.",
            fix="Leave out --nnodes, --node-rank, --master-addr and --master-port, which srun provides.",
        )


def _count_ranks(wish: str | None) -> str:
    """Return the number of ranks of this node, in digits."""
    wish = str(wish or 1)
    if wish == "cpu":
        return str(os.cpu_count())
    if wish in _DEVICES:
        # Count in another process: counting may start CUDA, and the threads per rank must be set before torch
        # is imported here.
        code = "import sys; from torch.distributed.run import determine_local_world_size as count; "
        command = [sys.executable, "-c", code + "print(count(sys.argv[1]))", wish]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_S, check=False)
        if done.returncode == 0:
            return done.stdout.split()[-1]
        reason = done.stderr.strip().splitlines()[-1]
        saw = f"--nproc-per-node {wish}, and this torch sees no such device ({reason})."
    elif wish.isdigit() and int(wish) > 0:
        return wish
    else:
        saw = f"--nproc-per-node {wish}."
    raise PacelineError(
        "PL320",
        saw=saw,
        rule="It is a whole number of at least 1, or auto, cpu, gpu or xpu for the number that this node "
        "has.",
        fix="Use for example --nproc-per-node 2. For GPUs, check that nvidia-smi lists them and that "
        "torch.version.cuda is not None.",
    )


def _set_threads(num_ranks: int, threads: int | None) -> None:
    """Set OMP_NUM_THREADS to cores / ranks unless the user sets it; torch reads it when it is imported."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        each = max(1, usable_cores() // num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(each)
        log.info(
            "%d rank%s, %d thread%s each (OMP_NUM_THREADS)",
            *(num_ranks, "" if num_ranks == 1 else "s", each, "" if each == 1 else "s"),
        )


def _set_grace(flags: argparse.Namespace) -> None:
    """Pass to ranks how long they have after a signal, until the scheduler or the launcher kills them."""
    patience_s = read_patience_s(flags.shutdown_timeout)
    if flags.shutdown_timeout is None and read_grace_s(os.environ) is not None:
        flags.shutdown_timeout = round(patience_s)  # torch's agent would kill them after 30 s
    note_grace(os.environ, min(patience_s, read_grace_s(os.environ) or patience_s))


def _why_cold(flags: argparse.Namespace, script: Script | None, cold: bool) -> str:
    if cold:
        return "--cold"
    if script is None:
        return "--no-python runs a program"
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return f"PYTHON_EXEC names another Python, {os.environ['PYTHON_EXEC']}"
    if flags.numa_binding:
        return "--numa-binding starts each rank with numactl"
    late = find_settings(script)
    if late:
        return f"the script sets {', '.join(late)}, which torch reads when it is imported"
    return ""


def _make_logs(flags: argparse.Namespace) -> tuple[Path, bool]:
    """Create a folder for this run's logs; return it, and whether it is kept also if no rank fails."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    keeps = bool(flags.log_dir) or any(wish not in ("", "0") for wish in (flags.redirects, flags.tee))
    base = Path(flags.log_dir or "logs")
    try:
        (base / name).mkdir(parents=True)
        return base / name, keeps
    except OSError as error:
        if flags.log_dir:
            raise PacelineError(
                "PL326",
                saw=f"--log-dir {flags.log_dir}: {error.strerror}.",
                rule="Each rank writes its log there.",
                fix="Choose a folder with write permission.",
            ) from None
        return Path(tempfile.mkdtemp(prefix="paceline-logs-")), keeps


# ---- running


def _run(job: ScriptJob, ranks: Ranks, check_signals: Callable[[], None]) -> None:
    flags = job.flags
    outcome: list[BaseException] = []
    job.rounds.on_restart = partial(log_restart, job, ranks)
    job.rounds.find_missing_files = partial(find_missing_files, job, ranks)
    job.rounds.may_be_consequence = partial(may_be_consequence, job, ranks)

    def work() -> None:
        try:
            waits = read_waits(config, flags.detect_s, flags.join_timeout)
            code = read_code(job.script.words) if job.script else {}
            folder = read_folder() if job.script and config.min_nodes < config.max_nodes else ""
            meeting = Meeting(waits, code, folder)
            build = partial(RankHandler, ranks, job.build_start)
            run_agent(config, command, args, build, ranks, job.rounds, meeting)
        except BaseException as error:
            outcome.append(error)

    succeeded = False
    try:
        from paceline.launching.elastic.agent import quiet_torchelastic, run_agent, start_thread
        from paceline.launching.elastic.code import read_code, read_folder
        from paceline.launching.elastic.rendezvous import Meeting, read_waits

        signals = flags.signals_to_handle, flags.shutdown_timeout
        with stop_by_signals(*signals, job.rounds, ranks) as stop, quiet_torchelastic():
            config, command, args = _configure(job)
            check_signals()  # a signal before `stop` took over may have been swallowed by an import
            with watching(job.watcher, job.folder, ranks, job.rounds):
                stop.supervise(start_thread(work), job.pump, job.watcher)
        judge(job, ranks, outcome[0] if outcome else None, stop)
        refuse_lost_output(job)
        succeeded = True
    finally:
        job.pump.drain()
        ranks.finish(kills=not succeeded)
        if not job.keeps_logs:
            shutil.rmtree(job.logs, ignore_errors=True)
            with suppress(OSError):
                job.logs.parent.rmdir()  # succeeds only if it is empty


def _configure(job: ScriptJob) -> tuple[LaunchConfig, str, list[str]]:
    """Return torchrun's configuration for its flags, with Paceline's changes, and the command to run."""
    from torch.distributed.run import config_from_args

    from paceline.launching.elastic.rendezvous import ONE_NODE

    flags = job.flags
    is_one_node = flags.standalone
    if is_one_node:
        flags.rdzv_backend, flags.rdzv_endpoint, flags.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    flags.master_port = flags.master_port or 29500
    # torchelastic's own files go into the logs' folder if that is kept.
    wished, flags.log_dir = flags.log_dir, str(job.logs if job.keeps_logs else job.folder / "torchelastic")
    flags.run_path = False  # the warm start runs every script in this way
    try:
        config, command, args = config_from_args(flags)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as error:
        raise PacelineError(
            "PL600",
            saw=f"{error}.",
            rule="torchrun's flags must be valid and consistent.",
            fix="See paceline run --help.",
        ) from None
    finally:
        flags.log_dir = wished
    if is_one_node:
        config.rdzv_backend = ONE_NODE
    job.is_warm &= config.numa_options is None
    return config, str(command), [str(word) for word in args]
