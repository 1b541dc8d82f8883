"""Shares a row of numbers per rank with all ranks of one machine, without messages of its own.

Protocol of one turn, in memory that all ranks have mapped:

1. Every rank writes its row.
2. All ranks take part in a collective that none can complete before all have joined it, such as the sum of
their gradients. Other code issues it for its own purpose.
3. Every rank reads all rows.

Turns alternate between two sets of rows. A rank that writes the next row of a set has completed the
collective of the turn between, and no rank joins that before it has read the set.
"""

from __future__ import annotations

import logging

import numpy as np
import torch.distributed as dist

from paceline.comm.segment import share_memory

log = logging.getLogger(__name__)

Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]
# Initial capacity of a row, in numbers.
_FIRST_LENGTH = 512


class NumberBoard:
    """The rows of a group's ranks.

    Args:
        group: the ranks, with a backend for the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_possible = True
        self._rows: np.ndarray[tuple[int, int, int], np.dtype[np.float64]] | None = None
        self._turn = 0

    def reserve(self, length: int) -> bool:
        """Make room for rows of `length` numbers; collective if there is too little.

        Returns:
            Whether there is a board; every rank gets the same answer.
        """
        if self._is_possible and (self._rows is None or length >= self._rows.shape[2]):
            room = max(_FIRST_LENGTH, 2 * (length + 1))
            memory = share_memory(self._group, 2 * self._group.size() * room * 8)
            if self._rows is None and self._group.rank() == 0:
                where = "a board in shared memory" if memory is not None else "messages"
                log.info("agreement: the ranks agree by %s", where)
            self._is_possible = memory is not None
            if memory is not None:
                self._rows = memory.numpy().view(np.float64).reshape(2, self._group.size(), room)
        return self._is_possible

    def write(self, row: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Begin a turn with this rank's row, for which `reserve` has made room."""
        assert self._rows is not None
        self._turn = 1 - self._turn
        own = self._rows[self._turn, self._group.rank()]
        own[0] = len(row)
        own[1 : len(row) + 1] = row

    def read(self) -> tuple[list[int], Rows]:
        """End a turn, after the collective.

        Returns:
            The length of each rank's row, and the rows, cut to the length of this rank's own. The rows are
            not
            copied: read them before the next turn but one.
        """
        assert self._rows is not None
        rows = self._rows[self._turn]
        lengths = [int(length) for length in rows[:, 0].tolist()]
        return lengths, rows[:, 1 : lengths[self._group.rank()] + 1]
