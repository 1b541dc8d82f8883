"""The messages between the launcher and the keeper, on one `multiprocessing` connection.

The launcher sends `Start` (with two descriptors), `LetRun`, `Kill` or `Sweep`. The keeper answers a `Start`
with `Started` or `Refused` and a `Sweep` with `Swept`, and sends `Ended` for each rank that it reaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.launching.rank.call import RankCall
from paceline.launching.rank.script import Script


@dataclass(frozen=True)
class Start:
    """A rank that the launcher wants; the descriptors of its stdout and stderr follow.

    Attributes:
        local_rank: its number on this node.
        rank: its number among all.
        environ: its whole environment.
        command: the program to execute, for a cold start.
        entry: what a forked rank becomes; None for a cold start.
        log: the file that the pump copies its output to; empty for none.
        folder: where it leaves word of its end.
        launch_folder: the launcher's, above it.
        watch: what it calls before anything else, see `watching.Watcher.entry`; empty for nothing.
    """

    local_rank: int
    rank: int
    environ: dict[str, str]
    command: tuple[str, ...]
    entry: Script | RankCall | None
    log: str
    folder: str
    launch_folder: str
    watch: str = ""


@dataclass(frozen=True)
class Kill:
    """The request to end a rank and all of its descendants now."""

    pid: int


@dataclass(frozen=True)
class LetRun:
    """The permission for ranks to run until some time of the monotonic clock; the keeper then ends them.

    Without such a message, they may run for ever.
    """

    until_s: float


@dataclass(frozen=True)
class Sweep:
    """The message that the job is over.

    Attributes:
        kills: whether processes that ranks have left behind are ended.
        leaves: whether the keeper ends too.
    """

    kills: bool
    leaves: bool


@dataclass(frozen=True)
class Started:
    """The message that a rank runs."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class Refused:
    """The message that a rank could not be started."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class Ended:
    """A rank has ended, by an exit code or a signal's number below zero, at a time in seconds since 1970."""

    pid: int
    status: int
    time_s: float


@dataclass(frozen=True)
class Swept:
    """The answer to `Sweep`."""
