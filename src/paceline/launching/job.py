"""One job on this node: the script or function, its logs and its folders."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from paceline.errors import PacelineError
from paceline.exit_codes import stop_code
from paceline.launching.ending.oom_kills import OomCounts, count_oom_kills
from paceline.launching.processes.keeper_messages import Start
from paceline.launching.processes.ranks import Attempts, Ranks
from paceline.launching.processes.streams import Pump, open_streams
from paceline.launching.rank.cold import let_in
from paceline.launching.rank.script import Script
from paceline.launching.stop import Interrupted
from paceline.launching.watcher import Watcher
from paceline.torch_seams.starting import bind_to_numa


@dataclass(kw_only=True)
class Job:
    """One launch on this node, of a script or of a function.

    Attributes:
        is_program: whether the launcher is a program of its own, as torchrun is: it then reports a rank that
            exits with Ctrl-C's or SIGTERM's code as failed, and its own exit code is 1. A call inside of the
            user's program exits with such a code itself. Both pass on 75, "stopped, not finished".
        folder: the launcher's folder for the ranks' records.
        logs: the folder of the ranks' logs, or None.
        keeps_logs: whether that folder is kept.
        pump: copies the ranks' output; None if they write to this process's streams themselves.
        watcher: the watcher of the ranks, or None.
        rounds: the number of starts of the ranks, and whether they were asked to stop.
        ooms: the kernel's counts of processes killed for memory, before the launch.
    """

    is_program: ClassVar[bool]

    folder: Path
    logs: Path | None
    keeps_logs: bool = True
    pump: Pump | None
    watcher: Watcher | None
    rounds: Attempts = field(default_factory=Attempts)
    ooms: OomCounts = field(default_factory=count_oom_kills)

    @property
    def attempt(self) -> Path:
        """The folder for the records of the latest attempt's ranks."""
        return self.folder

    def stop_error(self, number: int, num_killed: int) -> BaseException:
        """Return the error of a job that was asked to stop by this signal."""
        return SystemExit(stop_code(number))

    def start_error(self, error: BaseException) -> BaseException:
        """Return the error of a job whose agent failed before any rank did."""
        return error


@dataclass(kw_only=True)
class ScriptJob(Job):
    """One run of a script on this node.

    Attributes:
        flags: torchrun's, as parsed.
        script: the script; None for a program that is not a Python script.
        logs: the folder of the ranks' logs.
        keeps_logs: whether that folder is kept; set when a rank fails.
        pump: copies the ranks' output.
        is_warm: whether ranks are forked, rather than started as new Python processes.
    """

    is_program = True

    flags: argparse.Namespace
    script: Script | None
    logs: Path
    keeps_logs: bool
    pump: Pump
    is_warm: bool

    @property
    def attempt(self) -> Path:
        """The folder for the records of the latest attempt's ranks."""
        return self.folder / f"attempt-{max(0, self.rounds.number)}"

    def stop_error(self, number: int, num_killed: int) -> BaseException:
        """Return the error of a job that was asked to stop by this signal."""
        return Interrupted(number, num_killed)

    def start_error(self, error: BaseException) -> BaseException:
        """Return the error of a job whose agent failed before any rank did: PL344 with the reason."""
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return error  # not an error of the rendezvous; the command reports the limit
        if not isinstance(error, RendezvousError | OSError | RuntimeError | ValueError):
            return error
        if "EADDRINUSE" in str(error):
            return PacelineError(
                "PL344",
                saw=f"The ranks could not be started: {str(error).strip()}.",
                rule="The first node listens at the port of the rendezvous, and another process has it.",
                fix="End that process (see ss -ltnp) or use another --master-port or --rdzv-endpoint; on "
                "one node, leave both out.",
            )
        return PacelineError(
            "PL344",
            saw=f"The ranks could not be started: {type(error).__name__}: {str(error).strip()}",
            rule="Before ranks start, the nodes meet at the rendezvous, and the program must be found.",
            fix="Check --rdzv-endpoint (or --master-addr and --master-port) and --nnodes on every node.",
        )

    def build_start(
        self, *, args: tuple[str, ...], env: dict[str, str], **wishes: Any
    ) -> tuple[Start, tuple[int, int]]:
        """Build the keeper's message for a rank that torchelastic starts, and open its stdout and stderr."""
        self.attempt.mkdir(exist_ok=True)
        rank = int(env["RANK"])
        command = (wishes["entrypoint"], *map(str, args))
        watch = self.watcher.entry if self.watcher is not None and self.script is not None else ""
        if watch and not self.is_warm:
            command = let_in(command, watch, rank, str(self.folder), str(self.attempt))
        if wishes.get("numa_options") is not None:
            command = bind_to_numa(command, wishes["local_rank_id"], wishes["numa_options"])
        log = str(self.logs / f"rank-{rank:04d}.log")
        start = Start(
            local_rank=wishes["local_rank_id"],
            rank=rank,
            environ={**os.environ, **env},
            command=tuple(command),
            entry=self.script if self.is_warm else None,
            log=log,
            folder=str(self.attempt),
            launch_folder=str(self.folder),
            watch=watch,
        )
        files = (wishes["stdout"] or "", wishes["stderr"] or "")
        return start, open_streams(self.pump, *files, log, shows=True, persists=False)


@contextmanager
def watching(watcher: Watcher | None, folder: Path, ranks: Ranks, rounds: Attempts) -> Iterator[None]:
    """Watch ranks inside the context, if there is a watcher.

    Args:
        watcher: the watcher, or `None`.
        rounds: the rounds in which they are started.
    """
    if watcher is None:
        yield
        return
    before = ranks.on_failure, rounds.on_start, rounds.on_loss
    ranks.on_failure, rounds.on_start, rounds.on_loss = watcher.note_failure, watcher.meet, watcher.note_loss
    watcher.begin(folder, ranks.list_watched)
    try:
        yield
    finally:
        watcher.end()
        ranks.on_failure, rounds.on_start, rounds.on_loss = before  # ranks may be kept for the next launch
