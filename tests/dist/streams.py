"""Streams of a simulated GPU: finds memory that one stream uses while another may still write or read it.

Each stream has a clock of what it has waited for, by stream. An operation belongs to the current stream. It
is a race if it reads what another stream has written, or writes what another one reads or has written,
without having waited for it. Memory that the host drops goes to the next allocation on the stream that it
came from: this one must have waited for the other streams that have used it, unless `record_stream` was
called for them.

A collective that is not asynchronous runs on the current stream, as NCCL's do. Others are taken to have been
waited for at once, all-reduces excepted. Freeing by `resize_` is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


@dataclass
class Memory:
    """A storage: the stream that it was allocated on, and its last uses, each with its tick and its line."""

    alive: StorageWeakRef
    home: int
    written: tuple[int, int, str] | None = None
    read: dict[int, tuple[int, str]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


class Streams:
    """All streams of a device.

    Attributes:
        races: what was found, each with the lines.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._host: Clock = {}
        self._numbers = iter(range(1 << 30))
        self.default = Stream(self)
        self._current = [self.default]

    # ---- in the place of torch.cuda

    def current(self, *args: Any) -> Stream:
        return self._current[-1]

    def number(self) -> int:
        return next(self._numbers)

    @contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        self._current.append(stream or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def synchronize(self, *args: Any) -> None:
        """Let the host wait for the current stream."""
        join(self._host, self.current().clock)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Keep memory for a stream."""
        self._find(tensor, self.current()).recorded.add(stream.number)

    # ---- operations

    def run(self, call: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Note an operation on the current stream, and what it has returned."""
        schema = call._schema
        if any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return  # a view, which is no kernel
        self._sweep()
        given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        writes = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
        stream = self.current()
        self.use(
            stream,
            [leaf for name, each in given.items() if name not in writes for leaf in _list_tensors(each)],
            [leaf for name in writes & given.keys() for leaf in _list_tensors(given[name])],
            [made for made in _list_tensors(found) if made.untyped_storage()._cdata not in self._memories],
        )

    def use(
        self, stream: Stream, read: list[Tensor], written: list[Tensor], made: list[Tensor] | None = None
    ) -> None:
        """Note one kernel."""
        join(stream.clock, self._host)
        stream.clock[stream.number] = tick = stream.clock.get(stream.number, 0) + 1
        place = _find_place()
        for tensor in read:
            memory = self._find(tensor, stream)
            self._check(stream, memory.written, place, "reads what another stream writes")
            memory.read[stream.number] = tick, place
        for tensor in written:
            memory = self._find(tensor, stream)
            self._check(stream, memory.written, place, "overwrites what another stream writes")
            for other, (last, line) in memory.read.items():
                self._check(stream, (other, last, line), place, "overwrites what another stream reads")
            memory.written = stream.number, tick, place
        for tensor in made or ():
            self._find(tensor, stream).written = stream.number, tick, place
            for other, last, line in stream.dropped:
                self._check(stream, (other, last, line), place, "gets memory that another stream uses")
            stream.dropped = []

    def _check(self, stream: Stream, use: tuple[int, int, str] | None, place: str, what: str) -> None:
        if use is not None and stream.clock.get(use[0], 0) < use[1]:
            self.races.append(f"{place} {what} at {use[2]}")

    def _find(self, tensor: Tensor, stream: Stream) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = Memory(StorageWeakRef(storage), stream.number)
        return self._memories[key]

    def _sweep(self) -> None:
        """Find the memory that the host has dropped."""
        dead = [key for key, memory in self._memories.items() if memory.alive.expired()]
        for key in dead:
            memory = self._memories.pop(key)
            home = next(each for each in Stream.all if each.number == memory.home and each.streams is self)
            uses = [(stream, *use) for stream, use in memory.read.items()]
            for other, tick, line in [*uses, *([memory.written] if memory.written else [])]:
                if other not in memory.recorded:
                    home.dropped.append((other, tick, line))


class Stream:
    """A stream of the simulated GPU."""

    all: list[Stream] = []  # noqa: RUF012 - of every simulation

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.number = streams.number()
        self.clock: Clock = {}
        self.dropped: list[tuple[int, int, str]] = []  # uses of memory that was allocated here
        self.device = torch.device("cuda", 0)
        Stream.all.append(self)

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self.streams._host, self.clock)

    def query(self) -> bool:
        return True


class Event:
    """An event of the simulated GPU."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.streams.current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        join((stream or self.streams.current()).clock, self.clock)

    def synchronize(self) -> None:
        join(self.streams._host, self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]


def _find_place() -> str:
    """Return the innermost line of Paceline's, or of torch's own code that called the operation."""
    frame: FrameType | None = sys._getframe(2)
    first = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/tests/" not in file:
            name = f"{file.rpartition('/site-packages/')[2]}:{frame.f_lineno}:{frame.f_code.co_name}"
            if "/src/paceline/" in file:
                return name.rpartition("/src/paceline/")[2]
            first = first or name
        frame = frame.f_back
    return first
