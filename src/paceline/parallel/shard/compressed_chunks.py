"""Compressed sums of sharded gradients: each rank keeps its rows of the sum over all slots.

Microbatches are added within their slot, as in `parallel/compress.py`; the last call of a step sums the slots
of all ranks (`comm/slots.py`). The result has the bits of replicas and of one process, because rows are
encoded one by one, and fully_shard cuts between rows.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.residuals import RowRange
from paceline.comm.tree import TreeSum
from paceline.parallel.compress import Compression, OwnSlots, SumOfSlots
from paceline.parallel.shard.gradient_exchange import ExactChunks, GradientChunks, StepProgress
from paceline.parallel.shard.setup import Unit
from paceline.torch_seams.fsdp import list_records

# Per shard: rows of parameters, and their place in the shard's part of a flat vector.
Places = list[list[tuple[RowRange, int]]]


class CompressedChunks(GradientChunks):
    """The sum of one group's gradients over all ranks of dp, compressed by slots.

    Args:
        rounds: of this model.
        number: of the group.
        unit: the group's parameters.
        compression: of this model.
        slot_sum: sums over the ranks of dp.
        exact: the sum in steps that are not compressed.
        num_shards, rank: degree of dp_shard, and this rank's number in dp.

    Memory: between the microbatches, a flat vector of the group per slot of this rank, and those within a
    slot.
    """

    def __init__(
        self,
        rounds: StepProgress,
        number: int,
        unit: Unit,
        compression: Compression,
        slot_sum: SumOfSlots,
        exact: ExactChunks,
        *,
        num_shards: int,
        rank: int,
    ) -> None:
        super().__init__(rounds, number)
        self._unit = unit
        self._compression = compression
        self._slot_sum = slot_sum
        self._exact = exact
        self._num_shards = num_shards
        self._rank = rank
        self._own = OwnSlots()
        self._trees: list[TreeSum[Tensor]] = []
        self._places: Places | None = None

    def begin(self) -> None:
        super().begin()
        self._exact.begin()
        self._own = self._compression.cut(self._rounds.num_owned, self._rank)
        self._trees = [TreeSum(len(leaves), _add) for leaves in self._own.leaves]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rounds = self._rounds
        self._is_summed = rounds.is_last
        if not self._compression.is_on:
            self._exact(output_tensor, input_tensor, group, op, async_op)
            return
        for leaves, tree in zip(self._own.leaves, self._trees, strict=True):
            if rounds.index is not None and rounds.index in leaves:
                at = rounds.index - leaves.start
                # fully_shard drops the vector after the call, and nothing else is written into it.
                tree.push((at, at + 1), input_tensor)
        if not rounds.is_last:
            output_tensor.fill_(-0.0)
            return
        vectors = self._own.list_values(self._trees, None)
        self._trees = []
        shard = self._rank % self._num_shards
        if rounds.silent:
            output_tensor.copy_(input_tensor.view(self._num_shards, -1)[shard])
            return
        rounds.note(2 * self._number + 1)
        output_tensor.zero_()  # the padding, too
        if not sum(rounds.num_owned):
            return
        started_s = time.perf_counter()
        if self._places is None:
            self._places = self._list_places(len(output_tensor))
        self._slot_sum.sum(
            [[rows for rows, _ in places] for places in self._places],
            [self._cut(vector) for vector in vectors],
            [_view(output_tensor, rows, at) for rows, at in self._places[shard]],
            self._compression.factor,
            self._own.plan,
        )
        rounds.waited_s += time.perf_counter() - started_s

    def _cut(self, vector: Tensor | None) -> list[list[Tensor | None]]:
        """Return a slot's gradients, per shard and rows."""
        assert self._places is not None
        if vector is None:
            return [[None] * len(places) for places in self._places]
        chunks = vector.view(self._num_shards, -1)
        return [
            [_view(chunk, rows, at) for rows, at in places]
            for chunk, places in zip(chunks, self._places, strict=True)
        ]

    def _list_places(self, chunk_length: int) -> Places:
        names = {id(parameter): name for name, parameter in self._unit.parameters}
        found: Places = [[] for _ in range(self._num_shards)]
        at = 0
        for record in list_records(self._unit.module):
            parameter = record.sharded_param
            if not parameter.requires_grad:
                continue
            whole = RowRange.all_of(names[id(parameter)], parameter.shape)
            most = record.padded_sharded_param_size[0]
            for shard, places in enumerate(found):
                start, stop = min(shard * most, whole.stop), min((shard + 1) * most, whole.stop)
                if start < stop and whole.length:
                    places.append((RowRange(whole.name, start, stop, whole.length), at))
            at += most * whole.length
        assert at == chunk_length, (at, chunk_length)
        return found


def _view(chunk: Tensor, rows: RowRange, at: int) -> Tensor:
    return chunk[at : at + rows.num_rows * rows.length].view(rows.num_rows, rows.length)


def _add(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum, computed in place of `right`."""
    return right.add_(left)
