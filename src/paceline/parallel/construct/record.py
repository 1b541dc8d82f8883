"""What a factory did to memory: the operations in order, and which of them a tensor depends on.

Tensors are told by the bytes that they show (`StorageWindow`), not by the Python objects: views, `.data`,
`detach` and tied parameters then need no bookkeeping of their own, as all of them are windows into one
storage. An operation reads storages and writes storages; a slice is found by going back from a storage over
its writes up to one that covers it wholly, and from there over what was read.

The idea of a recorded construction is torchdistx' `deferred_init`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from paceline.torch_seams.operators import view_negated
from paceline.torch_seams.tensors import read_version


@dataclass(frozen=True, slots=True)
class StorageWindow:
    """Which bytes of which storage a tensor shows, and how.

    Attributes:
        storage: its number in the record.
        dtype: how the bytes are read.
        size, stride, offset: in elements.
        conj, neg: torch's lazy conjugation and negation.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @property
    def num_bytes(self) -> int:
        """Of its elements, each counted once."""
        num_elements = 1
        for extent in self.size:
            num_elements *= extent
        return num_elements * self.dtype.itemsize

    def is_dense(self) -> bool:
        """Whether its elements lie next to each other, in any order of the dimensions, none twice."""
        expected = 1
        for stride, extent in sorted(zip(self.stride, self.size, strict=True)):
            if extent != 1:
                if stride != expected:
                    return False
                expected *= extent
        return True

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that shows these bytes of a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        return view_negated(tensor) if self.neg else tensor


class Kind(Enum):
    """How an operation makes the bytes that it writes."""

    CALL = "call"  # by a function of torch
    DATA = "data"  # they were there: torch.tensor([...]), numpy, a tensor of the caller's
    EMPTY = "empty"  # not at all: memory as it came
    LOST = "lost"  # on the meta device before anyone could look: unknown


@dataclass(slots=True)
class Data:
    """Bytes that a factory brought along.

    Attributes:
        tensor: a real one, on whose storage the bytes are.
        version: torch's count of the writes to it, when it was met.
    """

    tensor: Tensor
    version: int

    def keep(self) -> None:
        """Copies the bytes, before someone writes over them."""
        storage = self.tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.tensor = whole.clone()
        self.version = read_version(self.tensor)

    def is_unchanged(self) -> bool:
        return read_version(self.tensor) == self.version


@dataclass(slots=True)
class Draw:
    """Where an operation's random numbers come from, if the factory itself seeded the generator.

    Attributes:
        state: of the generator before the operation; `None`: as the operation `previous` left it.
        previous: number of that operation.
    """

    state: Tensor | None
    previous: int | None


@dataclass(slots=True)
class RecordedOp:
    """One operation.

    Attributes:
        func: called with `args` and `kwargs`, in which windows stand for tensors.
        makes: position among its flat outputs, and window, of each output in a storage of its own.
        writes: storages that it changes, and whether every byte of them.
        reads: storages whose content it needs.
        kind: see `Kind`.
        random: it draws random numbers.
        draw: set where they are the factory's own; otherwise they are seeded by name.
        data: of `Kind.DATA`.
        dtype: torch's default when it was called.
        number: its place in the record.
    """

    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[tuple[int, StorageWindow]]
    writes: dict[int, bool]
    reads: tuple[int, ...]
    kind: Kind = Kind.CALL
    random: bool = False
    draw: Draw | None = None
    data: Data | None = None
    dtype: torch.dtype = torch.float32
    number: int = -1


@dataclass
class Record:
    """All operations of a construction, oldest first.

    Attributes:
        ops: the operations.
        num_bytes: of each storage, at its largest.
        writers: of each storage, numbers of the operations that write it, ascending.
        states: generator states after operations that drew from one seeded by the factory; filled while
            replaying, about 5 KB each.
        seeds: of the random operations, by number.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)

    def add_storage(self, num_bytes: int) -> int:
        """Number of a new storage."""
        self.num_bytes.append(num_bytes)
        self.writers.append([])
        return len(self.num_bytes) - 1

    def add(self, op: RecordedOp) -> None:
        """Appends an operation."""
        op.number = len(self.ops)
        self.ops.append(op)
        for storage in op.writes:
            self.writers[storage].append(op.number)

    def covers(self, window: StorageWindow) -> bool:
        """Whether writing all of a window leaves no byte of its storage as it was."""
        return window.is_dense() and window.num_bytes == self.num_bytes[window.storage]

    def slice(self, storages: Iterable[int], until: int, seen: set[int] | None = None) -> list[int]:
        """Numbers of the operations, ascending, that the content of storages depends on.

        Args:
            storages: whose content is wanted.
            until: as it was before the operation of this number.
            seen: operations known already with all that they depend on; those found are added to it.
        """
        found: list[int] = []
        seen = set() if seen is None else seen
        walked: set[tuple[int, int]] = set()
        wanted = [(storage, until) for storage in storages]

        def take(number: int) -> None:
            if number in seen:
                return
            seen.add(number)
            found.append(number)
            op = self.ops[number]
            wanted.extend((storage, number) for storage in op.reads)
            if op.draw is not None and op.draw.previous is not None and op.draw.previous not in self.states:
                pending.append(op.draw.previous)

        pending: list[int] = []
        while wanted or pending:
            while pending:
                take(pending.pop())
            if not wanted:
                break
            storage, before = wanted.pop()
            writers = self.writers[storage]
            for place in range(bisect_left(writers, before) - 1, -1, -1):
                if (storage, place) in walked:
                    break
                walked.add((storage, place))
                take(writers[place])
                if self.ops[writers[place]].writes[storage]:
                    break
        return sorted(found)

    def is_random(self, numbers: Iterable[int]) -> bool:
        """Whether any of these operations draws numbers that are seeded by name."""
        return any(self.ops[n].random and self.ops[n].draw is None for n in numbers)
