"""Divides the positions of a sequence over the ranks of cp: consecutive positions, or zigzag.

With a causal mask, a position attends to those before it, so the end of a sequence is more work than its
start. Zigzag balances that: the sequence is cut into 2n chunks of equal length, and rank r of n has chunks r
and 2n - 1 - r. The positions of each rank then attend to the same number of keys in total (Dubey et al. 2024,
"The Llama 3 Herd of Models", section 3.3.2).

    positions     0 ......................... 15      n = 4
    chunks        0   1   2   3   4   5   6   7
    consecutive   r0  r0  r1  r1  r2  r2  r3  r3
    zigzag        r0  r1  r2  r3  r3  r2  r1  r0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def count_rows(length: int, num_ranks: int) -> tuple[int, ...]:
    """Return how many positions each rank has; if the length does not divide, the first have one more."""
    low, more = divmod(length, num_ranks)
    return tuple(low + (rank < more) for rank in range(num_ranks))


@dataclass(frozen=True)
class Division:
    """The positions of a sequence, divided over ranks.

    Attributes:
        counts: the number of positions of each rank.
        is_zigzag: whether rank r of n has chunks r and 2n - 1 - r of 2n, and not consecutive positions.
    """

    counts: tuple[int, ...] = ()
    is_zigzag: bool = False

    @classmethod
    def of(cls, length: int, num_ranks: int, *, zigzag: bool = False) -> Division:
        """Divide a length; in zigzag if that is wanted and 2n chunks divide it."""
        fits = zigzag and num_ranks > 1 and length % (2 * num_ranks) == 0
        return cls(count_rows(length, num_ranks), fits)

    @cached_property
    def length(self) -> int:
        """The number of all positions."""
        return sum(self.counts)

    def list_runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return a rank's runs of consecutive positions in order, each as its first position and length."""
        if not self.is_zigzag:
            return ((sum(self.counts[:rank]), self.counts[rank]),)
        chunk = self.counts[rank] // 2
        return ((rank * chunk, chunk), ((2 * len(self.counts) - 1 - rank) * chunk, chunk))

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's positions of a whole tensor: a view if they are consecutive, else a copy."""
        runs = [tensor.narrow(dim, first, number) for first, number in self.list_runs(rank)]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor, from the parts of all ranks; the inverse of `take`."""
        if not self.is_zigzag:
            return torch.cat(list(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)

    def list_positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of a rank, int64."""
        runs = [torch.arange(first, first + number, device=device) for first, number in self.list_runs(rank)]
        return torch.cat(runs)
