"""The protocol between the launcher and a watcher of its ranks, which `paceline.watch` implements."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# Just before NCCL's own timeout of 10 minutes, after which it would end waiting ranks without naming those
# that they wait for. So no job is ended that torch's defaults would have let run. A computing rank has ten
# times as long.
HANG_AFTER_S = 540.0
# The watcher's socket in the folder of a launch.
SOCKET = "watch"

NoteError = Callable[[BaseException], None]
"""Called in a rank with the exception that ends its script, before it is reported elsewhere."""


def name_stacks(folder: Path, rank: int) -> Path:
    """Return the file where a rank's interpreter writes its stacks, in the folder of an attempt."""
    return folder / f"stacks-{rank}"


def name_account(folder: Path, rank: int) -> Path:
    """Return the file for a rank's account of its memory, in the folder of an attempt."""
    return folder / f"memory-{rank}.json"


def preload_watch(watch: str) -> None:
    """Import the watcher's entry module, so that ranks that are forked afterwards already have it."""
    if watch:
        importlib.import_module(watch.partition(":")[0])


def load_watch(watch: str, rank: int, launch_folder: str, folder: str) -> Callable[[], NoteError]:
    """Return a function that starts the watch in a rank; call it when all modules are visible again.

    Args:
        watch: see `Watcher.entry`; empty if there is no watcher.
        rank: the rank's global number.
        folder: the folder for the records of this attempt's ranks.
    """
    if not watch:
        return lambda: ignore_error
    module, _, function = watch.partition(":")
    begin = getattr(importlib.import_module(module), function)
    socket = os.path.join(launch_folder, SOCKET)
    enter = partial(begin, rank, socket, str(name_stacks(Path(folder), rank)))
    return lambda: enter().note_error


def ignore_error(error: BaseException) -> None:
    """Ignore an error; the `NoteError` of an unwatched rank."""


@dataclass(frozen=True)
class WatchedRank:
    """A rank's process, as the launcher has it.

    Attributes:
        rank: global.
        world_size: of the job.
        folder: the folder for the records of this attempt's ranks.
        pid: 0 if it has not started yet.
        exit_code: of a rank that has ended (negative: the signal that ended it).
    """

    rank: int
    world_size: int
    folder: Path
    pid: int
    exit_code: int | None


@dataclass(frozen=True)
class WatchMessage:
    """A watcher's message.

    Attributes:
        text: for people.
        table: the same for programs, as JSON-able values: a finding, with its details.
    """

    text: str
    table: Mapping[str, Any]


class JobStuck(Exception):  # noqa: N818 (named after the event)
    """The error of a job that cannot continue, by the watcher's verdict; its ranks were ended.

    Attributes:
        message: the verdict.
        hint: where to read more; may be empty.
    """

    exit_code = 1

    def __init__(self, message: WatchMessage, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.message.text, self.hint]))


class Watcher(Protocol):
    """A watcher of ranks in the launcher.

    Attributes:
        entry: `module:function` that each rank calls before the script's first line, with its global rank,
            the path of the watcher's socket, and that of a file for its stacks. Its result has a method
            `note_error`, a `NoteError`.
        final_message: the verdict that ends the job, or `None`.
        other_places: the places of the other ranks when the first one failed.
    """

    @property
    def entry(self) -> str: ...
    @property
    def final_message(self) -> WatchMessage | None: ...
    @property
    def other_places(self) -> str: ...

    def begin(self, folder: Path, list_ranks: Callable[[], Sequence[WatchedRank]]) -> None:
        """Start to watch.

        Args:
            folder: of the launch; it contains the watcher's socket.
            list_ranks: returns the newest process of each of this node's ranks.
        """

    def meet(self, node: int, num_nodes: int, host: str, port: int, attempt: int) -> None:
        """Prepare for ranks that are about to start, on this node as number `node` of `num_nodes`.

        Args:
            attempt: the number of restarts so far.
        """

    def note_failure(self, rank: int, status: int) -> None:
        """Record that a rank has failed, with this exit code or signal; the others run until this returns."""

    def note_loss(self) -> None:
        """Record that another node has ended the round, for which `note_failure` stops waiting."""

    def explain_failure(self) -> WatchMessage | None:
        """Return why ranks failed of an error elsewhere; `None` if no such cause is known."""

    def end(self) -> None:
        """Stop watching."""


build_default: Callable[[float], Watcher] | None = None
"""Builds the watcher of a launch from Python, from `hang_after_s`. `paceline/__init__.py` sets it, because
this layer must not import `paceline.watch`."""
