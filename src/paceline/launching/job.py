"""One job on this node: what is run, and where it leaves its logs and its word."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launching.ending.memory import OomCounts, count_oom_kills
from paceline.launching.processes.messages import Start
from paceline.launching.processes.ranks import Attempts, Ranks
from paceline.launching.processes.streams import Pump, open_streams
from paceline.launching.rank.cold import let_in
from paceline.launching.rank.script import Script
from paceline.launching.watcher import Watcher
from paceline.torch_seams.starting import bind_to_numa


@dataclass(kw_only=True)
class Job:
    """One launch on this node, of a script or of a function.

    Attributes:
        folder: the launcher's folder for what ranks leave word of.
        pump: copies what ranks print; None where they write to this process's streams themselves.
        watcher: who watches the ranks, or None.
        rounds: how often ranks were started, and whether they shall stop.
        ooms: what the kernel had killed for memory before.
    """

    folder: Path
    pump: Pump | None
    watcher: Watcher | None
    rounds: Attempts = field(default_factory=Attempts)
    ooms: OomCounts = field(default_factory=count_oom_kills)


@dataclass(kw_only=True)
class ScriptJob(Job):
    """One run of a script on this node.

    Attributes:
        flags: torchrun's, as parsed.
        script: what to run; None for a program that is no Python script.
        logs: the folder of the ranks' logs.
        keeps_logs: whether it stays; set when a rank fails.
        pump: copies what ranks print.
        is_warm: whether ranks are forked, rather than started by a Python of their own.
    """

    flags: argparse.Namespace
    script: Script | None
    logs: Path
    keeps_logs: bool
    pump: Pump
    is_warm: bool

    @property
    def attempt(self) -> Path:
        """Where the ranks of this round leave word."""
        return self.folder / f"attempt-{max(0, self.rounds.number)}"

    def build_start(
        self, *, args: tuple[str, ...], env: dict[str, str], **wishes: Any
    ) -> tuple[Start, tuple[int, int]]:
        """What torchelastic wants started, in the keeper's words, and its stdout and stderr."""
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
    """Inside, ranks are watched, where there is somebody who does.

    Args:
        watcher: who watches.
        folder: of the launch.
        ranks: that are started inside.
        rounds: in which they are.
    """
    if watcher is None:
        yield
        return
    before = ranks.on_failure, rounds.on_start
    ranks.on_failure, rounds.on_start = watcher.note_failure, watcher.meet
    watcher.begin(folder, ranks.list_watched)
    try:
        yield
    finally:
        watcher.end()
        ranks.on_failure, rounds.on_start = before  # ranks may be kept for the next launch
