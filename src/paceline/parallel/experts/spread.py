"""Divides a mixture's rows among the ranks of cp, which all have them: each sends those for some experts.

Under cp every rank of a data rank runs the router on whole sequences, so all of them have the same rows. The
experts are divided over ep in runs; the ranks of cp take these runs in turns. Each rank of cp sends the rows
for its runs to the other data ranks, which hold these experts, and gets the answers to them. Then the ranks
of cp exchange the answers, so that each has all.

| function | forward                                  | backward                                 |
|----------|------------------------------------------|------------------------------------------|
| `take`   | the rows of this rank's runs             | exchange: the gradients of all rows      |
| `join`   | exchange: the answers to all rows        | the gradients of this rank's answers     |

Rows are moved, never added. With C the bytes of all rows and m ranks of cp among which they are divided, a
rank sends (m-1)/m x C per exchange if the experts are equally full. These ranks must call the functions in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.tensor.differentiable import differentiate


@dataclass(frozen=True)
class SameRows:
    """This rank's place among the ranks of cp that divide the rows.

    Attributes:
        size: the number of these ranks.
        rank: this rank's number among them.
        group: their group; `None` for one.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def pick(self, numbers: Tensor, num_runs: int) -> Tensor:
        """Return the numbers of the experts in this rank's runs.

        Args:
            numbers: by expert, [experts, ...].
        """
        if self.size == 1:
            return numbers
        runs = numbers.view(num_runs, -1, *numbers.shape[1:])
        return runs[self.rank :: self.size].flatten(0, 1)

    def take(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of this rank's runs; collective in backward.

        Args:
            rows: [rows, width], sorted by run.
        """
        if self.size == 1:
            return rows
        return differentiate(_take, _join, rows, tuple(lengths), self)

    def join(self, answers: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the answers to all rows, from those of this rank's runs; collective."""
        if self.size == 1:
            return answers
        return differentiate(_join, _take, answers, tuple(lengths), self)


def _take(rows: Tensor, lengths: tuple[int, ...], spread: SameRows) -> Tensor:
    return torch.cat(torch.split(rows, list(lengths))[spread.rank :: spread.size])


def _join(own: Tensor, lengths: tuple[int, ...], spread: SameRows) -> Tensor:
    if not sum(lengths):
        return own  # nobody has rows: a rank without a microbatch
    by_rank = [list(lengths[rank :: spread.size]) for rank in range(spread.size)]
    totals = [sum(each) for each in by_rank]
    found = own.new_empty(sum(totals), *own.shape[1:])
    sent = torch.cat([own] * spread.size)
    dist.all_to_all_single(found, sent, totals, [len(own)] * spread.size, group=spread.group)
    runs: list[Tensor] = [found] * len(lengths)
    for rank, part in enumerate(torch.split(found, totals)):
        runs[rank :: spread.size] = torch.split(part, by_rank[rank])
    return torch.cat(runs)
