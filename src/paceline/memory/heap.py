"""Models how the C library (glibc) hands out memory: freed blocks that no later request fits stay resident.

A block above a threshold is mapped on its own, and goes back when it is freed. The threshold rises to the
size of the largest such block that was freed, up to 32 MiB; smaller blocks then come from the heap. A freed
block of the heap is used again for a smaller one, or for a larger one once its neighbours are free too. torch
asks for aligned blocks, for which glibc wants a little more than their size. Only the heap's free end goes
back.

Source: glibc 2.36, malloc/malloc.c: `_int_malloc`, `_int_memalign`, `_int_free`, `munmap_chunk`.
"""

from __future__ import annotations

from collections.abc import Hashable

LARGEST_IN_HEAP = 32 << 20
_PAGE = 4096
_FIRST_THRESHOLD = 128 << 10
# What an aligned block needs besides its size.
_MORE = 112


class Heap:
    """The memory that a process has from the C library.

    Attributes:
        resident: bytes that are mapped, or in the heap.
        peak: the most so far.
    """

    def __init__(self) -> None:
        self.resident = self.peak = 0
        self._threshold = _FIRST_THRESHOLD
        self._mapped: dict[Hashable, int] = {}
        # Blocks of the heap: where each begins and its size; free ones by their beginnings and by their ends.
        self._used: dict[Hashable, tuple[int, int]] = {}
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        # Where the last block ends, and what is free and resident above it.
        self._end = self._top = 0

    def allocate(self, name: Hashable, size: int) -> None:
        """Hand out a block under a name that is not in use."""
        if size >= self._threshold:
            self._mapped[name] = -(-(size + _MORE) // _PAGE) * _PAGE
            self._grow(self._mapped[name])
            return
        fits = [(block, begin) for begin, block in self._free.items() if block >= size + _MORE]
        if fits:
            block, begin = min(fits)
            self._remove(begin)
            self._add(begin + size, block - size)
        else:
            begin = self._end
            self._grow(max(0, size - self._top))
            self._top = max(0, self._top - size)
            self._end += size
        self._used[name] = begin, size

    def free(self, name: Hashable) -> None:
        """Take back a block."""
        if name in self._mapped:
            size = self._mapped.pop(name)
            self.resident -= size
            if size <= LARGEST_IN_HEAP:
                self._threshold = max(self._threshold, size)
            return
        begin, size = self._used.pop(name)
        if begin + size in self._free:
            size += self._remove(begin + size)
        if begin in self._ends:
            before = self._ends[begin]
            size += self._remove(before)
            begin = before
        if begin + size < self._end:
            self._add(begin, size)
            return
        self._end = begin
        self._top += size
        if self._top >= 2 * self._threshold:
            self.resident -= self._top
            self._top = 0

    def _add(self, begin: int, size: int) -> None:
        self._free[begin] = size
        self._ends[begin + size] = begin

    def _remove(self, begin: int) -> int:
        size = self._free.pop(begin)
        del self._ends[begin + size]
        return size

    def _grow(self, size: int) -> None:
        self.resident += size
        self.peak = max(self.peak, self.resident)
