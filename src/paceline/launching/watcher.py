"""What the launcher asks of somebody who watches its ranks: `paceline.watch`, which `cli` brings along."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# Just before NCCL's own ten minutes, after which it would end ranks that wait, without saying for whom: so no
# job is ended that torch's defaults would have let live. A rank that computes has ten times as long.
HANG_AFTER_S = 540.0
# The watcher's socket in the folder of a launch.
SOCKET = "watch"

NoteError = Callable[[BaseException], None]
"""Called in a rank with the exception that ends its script, before anybody else hears of it."""


def name_stacks(folder: Path, rank: int) -> Path:
    """Where a rank's interpreter writes its stacks, in the folder of an attempt."""
    return folder / f"stacks-{rank}"


def preload_watch(watch: str) -> None:
    """Import what lets the watcher into a rank, so that ranks that are forked afterwards have it already."""
    if watch:
        importlib.import_module(watch.partition(":")[0])


def load_watch(watch: str, rank: int, launch_folder: str, folder: str) -> Callable[[], NoteError]:
    """Load what lets the watcher into a rank; it is called once nobody hides modules any more.

    Args:
        watch: see `Watcher.entry`; empty where nobody watches.
        rank: its number among all.
        launch_folder: the launcher's.
        folder: where this attempt's ranks leave word.
    """
    if not watch:
        return lambda: ignore_error
    module, _, function = watch.partition(":")
    begin = getattr(importlib.import_module(module), function)
    socket = os.path.join(launch_folder, SOCKET)
    enter = partial(begin, rank, socket, str(name_stacks(Path(folder), rank)))
    return lambda: enter().note_error


def ignore_error(error: BaseException) -> None:
    """What a rank that nobody watches calls."""


@dataclass(frozen=True)
class WatchedRank:
    """A rank's process, as the launcher has it.

    Attributes:
        rank: global.
        world_size: of the job.
        folder: where this attempt's ranks leave word.
        pid: 0 where it hasn't started yet.
        exit_code: of one that has ended (negative: the signal that ended it).
    """

    rank: int
    world_size: int
    folder: Path
    pid: int
    exit_code: int | None


@dataclass(frozen=True)
class Said:
    """What a watcher has to say.

    Attributes:
        text: for people.
        table: the same for programs, as JSON holds it: a finding, and what belongs to it.
    """

    text: str
    table: Mapping[str, Any]


class JobStuck(Exception):  # noqa: N818 (an event, told as one)
    """The watcher has found that the job can't go on, and the ranks were ended.

    Attributes:
        said: its verdict.
        hint: where more can be read; may be empty.
    """

    exit_code = 1

    def __init__(self, said: Said, hint: str = "") -> None:
        super().__init__(said, hint)
        self.said = said
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.said.text, self.hint]))


class Watcher(Protocol):
    """Somebody who watches ranks from the launcher.

    Attributes:
        entry: `module:function` that each rank calls before the script's first line, with its global rank,
            the path of the watcher's socket, and that of a file for its stacks. What it gives has a method
            `note_error`, a `NoteError`.
        told: the verdict, once there is one that shall end the job.
        told_of_others: where the other ranks were when the first one failed.
    """

    @property
    def entry(self) -> str: ...
    @property
    def told(self) -> Said | None: ...
    @property
    def told_of_others(self) -> str: ...

    def begin(self, folder: Path, look: Callable[[], Sequence[WatchedRank]]) -> None:
        """Starts to watch.

        Args:
            folder: of the launch; ranks reach the watcher there.
            look: gives the newest process of each of this node's ranks.
        """

    def meet(self, node: int, num_nodes: int, host: str, port: int, attempt: int) -> None:
        """Ranks are about to start, on this node as number `node` of so many.

        Args:
            host, port: of the store where they meet.
            attempt: how often they have been restarted.
        """

    def note_failure(self, rank: int, status: int) -> None:
        """A rank has failed, with this exit code or signal, and the others live on until this returns."""

    def explain_failure(self, died: str = "") -> Said | None:
        """Why ranks failed that only felt what was wrong elsewhere; `None` where nothing is known of that.

        Args:
            died: a sentence on the rank that failed first, and by what.
        """

    def end(self) -> None:
        """Stops to watch."""


build_default: Callable[[float], Watcher] | None = None
"""Builds the watcher of a launch from Python, from `hang_after_s`. The front door (`paceline/__init__.py`)
sets it, because this layer does not know `paceline.watch`."""
