"""torchelastic's agent and rendezvous, with ranks from the keeper.

torch's agent meets the other nodes, assigns ranks, notices when one ends, and restarts them. This file starts
ranks through the keeper instead of Popen, and fixes two faults of the agent:

- In torch 2.13, ranks that are restarted use the store of the round before, where gloo finds the addresses of
  dead processes (pytorch#135712). Here each round gets a store of its own, as torch's own comment in
  `distributed/rendezvous.py` expects.
- If nodes come or go, ranks that save and stop together end at the same moment on all nodes. torch's agents
  count that as a failure, unless they were first to notice. Here, a node that is asked to leave announces it,
  and the others start again in the next round, at no cost in restarts. The same holds for ranks that fail
  because another node was lost.

`rendezvous.py` defines how the nodes meet.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig

from paceline.errors import PacelineError
from paceline.launching.elastic.members import StoreRendezvous
from paceline.launching.elastic.rendezvous import Meeting, build_rendezvous
from paceline.launching.processes.ranks import Attempts, Ranks
from paceline.torch_seams.elastic import SteppedAgent

log = logging.getLogger(__name__)

_MEETING = Meeting()


def run_agent(
    config: LaunchConfig,
    command: str,
    args: list[str],
    build_handler: Callable[..., Any],
    ranks: Ranks,
    rounds: Attempts,
    meeting: Meeting = _MEETING,
) -> None:
    """Run ranks until all have succeeded.

    Follows `torch.distributed.launcher.api.launch_agent`.

    Raises:
        ChildFailedError: a rank failed, and no restart is left.
        SignalException: `rounds.asked` was set.
    """

    def end_ranks() -> None:
        rounds.on_loss()
        for rank in ranks.running:
            if rank.pid:
                ranks.kill(rank)

    handler, master = build_rendezvous(
        config, meeting, on_loss=end_ranks, hold=ranks.hold, is_asked=lambda: rounds.asked is not None
    )
    if isinstance(handler, StoreRendezvous) and handler.is_elastic:
        log.info("%s", meeting.waits)
    known = {field.name for field in dataclasses.fields(WorkerSpec)}  # older torch has fewer
    wishes = {
        "role": config.role,
        "local_world_size": config.nproc_per_node,
        "entrypoint": command,
        "args": tuple(args),
        "rdzv_handler": handler,
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "master_addr": master[0],
        "master_port": master[1],
        "local_addr": config.local_addr,
        **{
            name: getattr(config, name)
            for name in (
                *("event_log_handler", "numa_options", "virtual_local_rank"),
                *("duplicate_stdout_filters", "duplicate_stderr_filters"),
            )
            if hasattr(config, name)
        },
    }
    spec = WorkerSpec(**{name: value for name, value in wishes.items() if name in known})
    options = {
        "logs_specs": config.logs_specs,
        "start_method": config.start_method,
        "log_line_prefix_template": config.log_line_prefix_template,
        # Older torch does not have this setting, and its agent does not take it.
        "shutdown_timeout": getattr(config, "shutdown_timeout", None),
    }
    takes = inspect.signature(SteppedAgent.__init__).parameters
    agent = _Agent(rounds, ranks, spec=spec, **{n: v for n, v in options.items() if n in takes})
    metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
    is_asked = False
    try:
        with _ranks_from(build_handler):
            result: RunResult = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        # The result is None if this node was one too many for the job.
        if result is not None and result.is_failed():
            raise ChildFailedError(name=command, failures=result.failures)
    except SignalException:
        is_asked = True
        raise
    except ChildFailedError:
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        # A node that was asked to leave does not close the rendezvous for those that stay.
        if not is_asked:
            handler.shutdown()
        elif isinstance(handler, StoreRendezvous):
            handler.leave()


class _Agent(SteppedAgent):
    def __init__(self, rounds: Attempts, ranks: Ranks, **options: Any) -> None:
        super().__init__(**options)
        self._rounds = rounds
        self._ranks = ranks
        handler = options["spec"].rdzv_handler
        self._members = handler if isinstance(handler, StoreRendezvous) else None

    def meet(self, group: WorkerGroup) -> None:
        try:
            super().meet(group)
        except (RuntimeError, RendezvousClosedError):
            if self._rounds.asked is not None:
                raise SignalException("asked", sigval=signal.Signals(self._rounds.asked)) from None
            raise
        if group.spec.rdzv_handler.get_backend() == "static" and self._rounds.number >= 0:
            self._renew_static_store(group)

    def _renew_static_store(self, group: Any) -> None:
        """Open a new store on node 0 for each restart: a static rendezvous has only one store."""
        key = f"paceline/store-{self._rounds.number}"
        if group.group_rank == 0:
            self._store_of_round = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
            group.store.set(key, str(self._store_of_round.port))
        group.master_port = int(group.store.get(key))

    def start_ranks(self, group: Any) -> dict[int, Any]:
        self._rounds.begin()
        place = group.group_rank, group.group_world_size, group.master_addr, group.master_port
        # A node that has come back has not counted the starts before.
        number = self._rounds.number if self._members is None else self._members.formed_round
        self._rounds.on_start(*place, number)
        return super().start_ranks(group)

    def poll_ranks(self, group: WorkerGroup) -> RunResult:
        members = self._members
        if self._rounds.asked is not None:
            if members is not None:
                # Before its ranks get the signal, and stop with all others.
                members.announce_leave()
            raise SignalException("asked to stop", sigval=signal.Signals(self._rounds.asked))
        result = super().poll_ranks(group)
        if members is None:
            return result
        has_failed = result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED)
        if has_failed and members.news is None and self._rounds.may_be_consequence():
            # A node that was lost is known to be lost so long after the ranks have failed.
            ended_s = min(rank.ended_s or time.time() for rank in self._ranks.latest)
            members.await_news(members.detection_s - (time.time() - ended_s))
        if members.lost and not members.is_elastic and result.state != WorkerState.SUCCEEDED:
            raise _build_loss_error(members)
        if has_failed and members.is_elastic and members.news is None:
            self._await_files(members)
        if has_failed and members.is_elastic and members.news is not None:
            return RunResult(WorkerState.HEALTHY)  # the agent then asks num_nodes_waiting()
        return result

    def _await_files(self, members: StoreRendezvous) -> None:
        """Wait for a node to join if the ranks failed because they need the files of absent nodes."""
        error = self._rounds.find_missing_files()
        if error is None or not members.has_room:
            return
        log.warning("%s", error)
        log.warning("the files are on nodes that are not here; the ranks start again when a node joins")
        if not members.await_news(members.join_s) and self._rounds.asked is None:
            raise error

    def restart_ranks(self, group: WorkerGroup) -> None:
        news = None if self._members is None else self._members.news
        if news is not None:
            self._rounds.on_loss()  # the reason is known, and the watcher need not wait for other nodes
        if self._members is None or not self._members.lost:
            self.stop_ranks(group)
        for rank in self._ranks.latest:
            self._ranks.kill(rank)
        self._rounds.on_restart(self.restarts_left, news)
        super().restart_ranks(group)

    def wait_for_others(self) -> None:
        if self._members is None:
            super().wait_for_others()
        else:
            self._members.finish()


def _build_loss_error(members: StoreRendezvous) -> PacelineError:
    error = PacelineError(
        "PL372",
        saw=f"{members.news}. The ranks of this node were ended.",
        rule="This job needs all of its nodes: --nnodes has no range, and --max-restarts is 0.",
        fix="Start the job again. With --nnodes MIN:MAX it goes on with the nodes that are left; with "
        "--max-restarts it waits for the lost node.",
    )
    error.exit_code = 1
    return error


@contextmanager
def _ranks_from(build_handler: Callable[..., Any]) -> Iterator[None]:
    """Make the agent start its processes with `build_handler`, through torchelastic's own hook."""
    name = "get_subprocess_handler"
    before = getattr(elastic_processes, name)
    setattr(elastic_processes, name, build_handler)
    try:
        yield
    finally:
        setattr(elastic_processes, name, before)


@contextmanager
def quiet_torchelastic() -> Iterator[None]:
    """Silence the agent's log lines: the launcher reports the same once, with the cause."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith((*names, "torch.distributed.run"))
        and isinstance(logger, logging.Logger)
        and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Run the agent in a thread, so that the main thread stays free to handle signals."""
    thread = threading.Thread(target=work, name="paceline-agent", daemon=True)
    thread.start()
    return thread
