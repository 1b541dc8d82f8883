"""Sums gradients as products of two thin matrices: PowerSGD, with the same bits on any number of ranks.

The method: Vogels et al. 2019, https://arxiv.org/abs/1905.13727. The gradient of a parameter with n rows of m
numbers is sent as an n x r and an m x r matrix. Slots are those of `comm/slots.py`.

Protocol for some parameters, with M_s for the gradient of slot s plus its residual:

1. Every rank computes P_s = M_s B for its slots. B is the basis, m x r: the result of step 3 in the last
   step, at first random numbers that follow from the parameter's name. The P_s of all slots are summed.
2. Every rank makes the columns of P orthonormal, computes Q_s = M_s' P for its slots and keeps M_s - P Q_s'
   as the new residual. The Q_s of all slots are summed.
3. The sum of the gradients is P Q', and Q is the next basis.

If several ranks share a slot, the first of them gets the slot's gradients from the others, added exactly
(`comm/slot_ranks.py`), and does the rest alone.

Both sums are exact ones, in the order of the tree over slots (`comm/exchange.py`). Steps 1 and 2 take one
exchange each, however many parameters there are. Parameters that would not become half as large travel in the
first exchange as they are.

B is made orthonormal before use. A column of zeros, which a gradient of lower rank gives, therefore turns
into a direction of its own. P has the magnitude of the gradient and not that of its square.

A gradient with inf or nan makes the whole sum nan, so the step is skipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange
from paceline.comm.residuals import BASIS, Residuals, RowRange
from paceline.comm.slot_ranks import add_columns, count_sharing, list_own_slots
from paceline.comm.tree import ReductionPlan, TreeSum, plan_reduction


class LowRankSum:
    """A sum over the slots of all ranks, with gradients as products of thin matrices.

    Args:
        low_rank: r, the columns of the thin matrices.
        num_slots: over all ranks; a multiple of these, or a divisor.
        residuals: of this rank, and the bases.
        exchange: sums over ranks; `None` in a world of one.
        group: the ranks; `None` in a world of one.
        num_shards: ranks that share a parameter's rows; ranks of one replica are neighbours.

    Attributes:
        own: the numbers of this rank's slots; none if another rank has the slot that it shares.
    """

    def __init__(
        self,
        low_rank: int,
        num_slots: int,
        residuals: Residuals,
        exchange: Exchange | None,
        group: dist.ProcessGroup | None,
        num_shards: int = 1,
    ) -> None:
        num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        self._group = group
        self._sharing = count_sharing(num_slots, num_ranks)
        self._sent_within_bytes = 0
        self._low_rank = low_rank
        self._num_slots = num_slots
        self._residuals = residuals
        self._exchange = exchange
        self._shard = rank % num_shards
        leads = rank % self._sharing == 0
        self.own = list_own_slots(num_slots, num_ranks, rank) if leads else range(0)
        counts = [max(1, num_slots // num_ranks) if at % self._sharing == 0 else 0 for at in range(num_ranks)]
        self._plan = plan_reduction(tuple(counts))

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this rank has sent to others so far."""
        between_bytes = 0 if self._exchange is None else self._exchange.sent_bytes
        return self._sent_within_bytes + between_bytes

    def sum(
        self,
        shards: Sequence[Sequence[RowRange]],
        slots: Sequence[Sequence[Sequence[Tensor | None]]],
        totals: Sequence[Tensor],
        factor: float,
        plan: ReductionPlan | None = None,
    ) -> None:
        """Sum the slots of all ranks; collective. The arguments are those of `SlotSum.sum`."""
        device = totals[0].device if totals else torch.device("cpu")
        if plan is not None:
            slots = self._add_within_slot(shards, slots, plan, device)
        wholes = _join(shards)
        self._residuals.replace({piece.name for piece in wholes})
        matrices = [each for each in wholes if is_low_rank(each.num_rows, each.length, self._low_rank)]
        others = [each for each in wholes if each not in matrices]
        bases = [_orthonormalise(self._take_basis(each, device)) for each in matrices]
        given = [_collect(shards, gradients, factor, device) for gradients in slots]

        sizes = [each.num_rows * self._low_rank for each in matrices]
        sizes += [each.num_rows * each.length for each in others]
        tree = TreeSum(self._num_slots, _add)
        for slot, gradients in zip(self.own, given, strict=True):
            vector = torch.empty(sum(sizes), device=device)
            parts = iter(torch.split(vector, sizes))
            for piece, basis in zip(matrices, bases, strict=True):
                residual = self._residuals.take(slot, piece)
                if residual is not None:
                    gradients[piece.name].add_(residual)
                # Into memory of its own: a library's product may depend on where the result begins.
                next(parts).copy_(torch.mm(gradients[piece.name], basis).view(-1))
            for piece in others:
                next(parts).copy_(gradients.pop(piece.name).reshape(-1))
            tree.push((slot, slot + 1), vector)
        summed = iter(torch.split(self._sum_vectors(tree, sum(sizes), device), sizes))
        left = [_orthonormalise(next(summed).view(piece.num_rows, -1)) for piece in matrices]
        whole = dict(zip((piece.name for piece in others), summed, strict=True))

        right = self._sum_right(matrices, left, given, device)
        for piece, factor_left, factor_right in zip(matrices, left, right, strict=True):
            self._residuals.put(BASIS, self._name_basis(piece), factor_right)
            whole[piece.name] = torch.mm(factor_left, factor_right.T)
        for piece, target in zip(shards[self._shard], totals, strict=True):
            rows = whole[piece.name].view(-1, piece.length)[piece.start : piece.stop]
            torch.mul(rows, 1.0 / factor, out=target)

    def _add_within_slot(
        self,
        shards: Sequence[Sequence[RowRange]],
        subtrees: Sequence[Sequence[Sequence[Tensor | None]]],
        plan: ReductionPlan,
        device: torch.device,
    ) -> list[list[list[Tensor | None]]]:
        """Return the gradients of the slot on its first rank, and nothing on the others; collective."""
        places = {
            piece: (shard, number)
            for shard, pieces in enumerate(shards)
            for number, piece in enumerate(pieces)
        }

        def find_rows(subtree: int, piece: RowRange) -> Tensor | None:
            shard, number = places[piece]
            return subtrees[subtree][shard][number]

        assert self._group is not None
        columns = [list(places)] + [list[RowRange]()] * (self._sharing - 1)
        added, num_bytes = add_columns(self._group, self._sharing, plan, columns, find_rows, device)
        self._sent_within_bytes += num_bytes
        return [[[added.get(piece) for piece in pieces] for pieces in shards] for _ in self.own]

    def _sum_right(
        self,
        matrices: Sequence[RowRange],
        left: Sequence[Tensor],
        given: Sequence[dict[str, Tensor]],
        device: torch.device,
    ) -> list[Tensor]:
        """Return the sum of every Q_s, and note the residuals; turns the gradients of `given` into them."""
        sizes = [piece.length * self._low_rank for piece in matrices]
        if not sizes:
            return []
        tree = TreeSum(self._num_slots, _add)
        for slot, gradients in zip(self.own, given, strict=True):
            vector = torch.empty(sum(sizes), device=device)
            for piece, factor_left, part in zip(matrices, left, torch.split(vector, sizes), strict=True):
                matrix = gradients[piece.name]
                own = torch.mm(matrix.T, factor_left)
                part.copy_(own.view(-1))
                self._residuals.put(slot, piece, matrix.addmm_(factor_left, own.T, alpha=-1.0))
            tree.push((slot, slot + 1), vector)
        summed = torch.split(self._sum_vectors(tree, sum(sizes), device), sizes)
        return [part.view(piece.length, -1).clone() for piece, part in zip(matrices, summed, strict=True)]

    def _sum_vectors(self, tree: TreeSum[Tensor], length: int, device: torch.device) -> Tensor:
        """Return the sum of the vectors of all slots."""
        if self._exchange is None:
            [(_, total)] = tree.subtrees
            return total
        total = torch.empty(length, device=device)
        self._exchange.sum_subtrees([vector for _, vector in tree.subtrees], self._plan, total)
        return total

    def _name_basis(self, piece: RowRange) -> RowRange:
        return RowRange(piece.name, 0, piece.length, self._low_rank)

    def _take_basis(self, piece: RowRange, device: torch.device) -> Tensor:
        kept = self._residuals.take(BASIS, self._name_basis(piece))
        if kept is not None:
            return kept
        # The same on every rank, and not that of another parameter of the same shape.
        generator = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
        return torch.randn(piece.length, self._low_rank, generator=generator).to(device)


def is_low_rank(num_rows: int, length: int, low_rank: int) -> bool:
    """Return whether a parameter is sent as two thin matrices: if these have at most half of its numbers."""
    return 2 * low_rank * (num_rows + length) <= num_rows * length


def _orthonormalise(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns [length, r], r at most the length; nan if one is not finite.

    In fp64, so that rounding does not matter however close the columns are.
    """
    if not columns.isfinite().all():
        return torch.full_like(columns, torch.nan)
    orthonormal: Tensor = torch.linalg.qr(columns.double()).Q
    return orthonormal.float()


def _join(shards: Sequence[Sequence[RowRange]]) -> list[RowRange]:
    """Return the whole parameters whose rows the shards hold, in the order of their first rows."""
    stops = {piece.name: piece.stop for shard in shards for piece in shard}
    lengths = {piece.name: piece.length for shard in shards for piece in shard}
    return [RowRange(name, 0, stop, lengths[name]) for name, stop in stops.items()]


def _collect(
    shards: Sequence[Sequence[RowRange]],
    gradients: Sequence[Sequence[Tensor | None]],
    factor: float,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return a slot's whole gradients [num_rows, length] by name, times `factor`, in memory of their own."""
    rows: dict[str, list[Tensor]] = {}
    for shard, found in zip(shards, gradients, strict=True):
        for piece, gradient in zip(shard, found, strict=True):
            if gradient is None:
                part = torch.zeros(piece.num_rows, piece.length, device=device)
            else:
                # 0.0 turns -0.0 into 0.0: whether a missing gradient is either depends on the ranks.
                part = (gradient * factor).add_(0.0)
            rows.setdefault(piece.name, []).append(part)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}


def _add(left: Tensor, right: Tensor) -> Tensor:
    return right.add_(left)
