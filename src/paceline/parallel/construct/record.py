"""A record of a factory's effects on memory: operations in order, and those that a tensor depends on.

Tensors are identified by the bytes that they show (`StorageWindow`), not by the Python objects. Views,
`.data`, `detach` and tied parameters then need no bookkeeping of their own, because all of them are windows
into one storage. An operation reads and writes storages. A slice is found by going back from a storage over
its writes up to one that covers it wholly, and from there over the storages that were read.

torchdistx' `deferred_init` introduced recorded constructions.
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
    """The bytes of a storage that a tensor shows, and their layout.

    Attributes:
        storage: its number in the record.
        dtype: type of the elements.
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
        """The number of bytes of its elements, each counted once."""
        num_elements = 1
        for extent in self.size:
            num_elements *= extent
        return num_elements * self.dtype.itemsize

    def is_dense(self) -> bool:
        """Return whether its elements are adjacent, in any order of the dimensions, without repetition."""
        expected = 1
        for stride, extent in sorted(zip(self.stride, self.size, strict=True)):
            if extent != 1:
                if stride != expected:
                    return False
                expected *= extent
        return True

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that shows these bytes of a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        return view_negated(tensor) if self.neg else tensor


class Kind(Enum):
    """The way in which an operation produces the bytes that it writes."""

    CALL = "call"  # by a function of torch
    DATA = "data"  # existing bytes: torch.tensor([...]), numpy, a tensor of the caller's
    EMPTY = "empty"  # none: uninitialised memory
    LOST = "lost"  # unknown: on the meta device before anything was recorded


@dataclass(slots=True)
class Data:
    """The bytes that a factory loads from outside.

    Attributes:
        tensor: a real tensor on the storage with the bytes.
        version: torch's count of the writes to it, when it was first seen.
    """

    tensor: Tensor
    version: int

    def keep(self) -> None:
        """Copy the bytes, before they are overwritten."""
        storage = self.tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.tensor = whole.clone()
        self.version = read_version(self.tensor)

    def is_unchanged(self) -> bool:
        return read_version(self.tensor) == self.version


@dataclass(slots=True)
class Draw:
    """The origin of an operation's random numbers, if the factory itself seeded the generator.

    Attributes:
        state: of the generator before the operation; `None`: the state that `previous` left.
        previous: number of that operation.
    """

    state: Tensor | None
    previous: int | None


@dataclass(slots=True)
class RecordedOp:
    """One operation of a construction.

    Attributes:
        func: called with `args` and `kwargs`, in which windows stand for tensors.
        makes: index among its flat outputs, and window, of each output in a storage of its own.
        writes: storages that it changes, each with whether it writes every byte.
        reads: storages whose content it needs.
        kind: see `Kind`.
        random: whether it draws random numbers.
        draw: set if the factory seeded them; otherwise they are seeded by name.
        data: for `Kind.DATA`.
        dtype: torch's default dtype when it was called.
        number: its index in the record.
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
        num_bytes: of each storage, the maximum.
        writers: of each storage, numbers of the operations that write it, ascending.
        states: generator states after operations that drew from one seeded by the factory; filled during
            replay, about 5 KB each.
        seeds: of the random operations, by number.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)

    def add_storage(self, num_bytes: int) -> int:
        """Add a storage and return its number."""
        self.num_bytes.append(num_bytes)
        self.writers.append([])
        return len(self.num_bytes) - 1

    def add(self, op: RecordedOp) -> None:
        """Append an operation."""
        op.number = len(self.ops)
        self.ops.append(op)
        for storage in op.writes:
            self.writers[storage].append(op.number)

    def covers(self, window: StorageWindow) -> bool:
        """Return whether writing all of a window overwrites every byte of its storage."""
        return window.is_dense() and window.num_bytes == self.num_bytes[window.storage]

    def slice(self, storages: Iterable[int], until: int, seen: set[int] | None = None) -> list[int]:
        """Return the numbers of the operations, ascending, that the content of storages depends on.

        Args:
            storages: the storages whose content is wanted.
            until: their content before the operation of this number.
            seen: operations already known with all that they depend on; those found are added to it.
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
            # The generator's state is the one that an earlier draw left, so that draw must be repeated too.
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
            # Go back over the writes until one covers the whole storage: older ones cannot show through.
            for place in range(bisect_left(writers, before) - 1, -1, -1):
                if (storage, place) in walked:
                    break
                walked.add((storage, place))
                take(writers[place])
                if self.ops[writers[place]].writes[storage]:
                    break
        return sorted(found)

    def is_random(self, numbers: Iterable[int]) -> bool:
        """Return whether any of these operations draws numbers that are seeded by name."""
        return any(self.ops[n].random and self.ops[n].draw is None for n in numbers)
