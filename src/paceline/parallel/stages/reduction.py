"""Sums the gradients of a stage: over its microbatches, then over the data ranks.

Backwards of microbatches may come in any order. An exact sum adds them in the order of the tree, as without
pp, so the bits do not depend on the layout. A fast one adds them as they come; its sum over the data ranks
runs while other stages still compute. If the parameters are sharded with `zero` 2 and 3, it sums each
microbatch over dp_shard and keeps this rank's rows alone; a rank without a microbatch left takes part with
zeros.

Which parameters got a gradient travels with the sums, as one number per parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.tree_exchange import nothing_like
from paceline.mesh import Axis, Mesh
from paceline.parallel.stages.stage_shards import StageShards
from paceline.parallel.sums.gradient_sum import GradientSum, RankSum
from paceline.parallel.sums.gradients import Gradients, flatten, take_gradients, view_as


class StageSum:
    """The gradients of the parameters that one stage adds up.

    Args:
        parameters: to train; those that this stage is the first to use.
        ranks: sums over them.
        shards: of the parameters, which get the sums; `None` if they are not sharded.

    Usage per step: `begin`; per microbatch `take` and `put`; `start_sum` once `is_complete`; `end`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], dp: Axis, ranks: RankSum, shards: StageShards | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._dp = dp
        self._shards = shards
        self._cuts_each = shards is not None and shards.zero > 1 and not ranks.is_exact
        self._sum = GradientSum(ranks, self._pack, cuts_each=self._cuts_each)
        self._none: Gradients = [None] * len(self._parameters)
        self._used = [False] * len(self._parameters)
        self._num_leaves = 0
        self._num_left = 0

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all of this rank's microbatches are set aside."""
        return self._num_left == 0

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
        """
        self._num_leaves = sum(num_owned)
        self._used = [False] * len(self._parameters)
        self._num_left = max(num_owned, default=0) if self._cuts_each else num_owned[self._dp.rank]
        self._sum.begin(num_owned)

    def take(self) -> Gradients:
        """Return the gradients that the parameters have, and take them off."""
        return take_gradients(self._parameters)

    @torch.no_grad()
    def put(self, index: int, gradients: Gradients) -> None:
        """Add the gradients of a microbatch, by its number in the global batch, to the sum."""
        self._num_left -= 1
        self._used = [used or g is not None for used, g in zip(self._used, gradients, strict=True)]
        if self._parameters:
            self._sum.add(index, gradients)

    def add_nothing(self) -> None:
        """Take part in the sum over dp_shard of a microbatch that this rank does not have."""
        if self._cuts_each:
            self.put(-1, self._none)

    @torch.no_grad()
    def start_sum(self) -> None:
        """Start the sum over the data ranks, if it can run beside computations; all of them must call it."""
        if self._parameters and self._num_leaves and self._dp.size > 1:
            self._sum.start(self._none)

    @torch.no_grad()
    def end(self) -> None:
        """Put the sums into the parameters; collective over the data ranks."""
        total = list(self._none)
        if self._parameters and self._num_leaves:
            total = self._finish()
        for parameter, gradient in zip(self._parameters, total, strict=True):
            if self._shards is None:
                parameter.grad = gradient
            else:
                self._shards.keep_gradient(parameter, gradient)

    def _finish(self) -> Gradients:
        """Return the sums over the data ranks; of a sharded parameter this rank's rows."""
        if self._dp.size == 1:
            [alone] = self._sum.take()
            return self._none if alone is None else alone
        found = list(self._none)
        for places, row in zip(self._list_places(), self._sum.finish(self._none), strict=True):
            like = [self._parameters[place] for place in places]
            if self._shards is not None:
                parts = self._shards.unpack(row, like)
            else:
                lengths = [parameter.numel() for parameter in like]
                parts = [
                    view_as(part, parameter)
                    for part, parameter in zip(torch.split(row[: sum(lengths)], lengths), like, strict=True)
                ]
            # Only for a parameter that this rank has not used does it wait for the device, to ask the others.
            counts = [1] if all(self._used[n] for n in places) else row[-len(places) :].tolist()
            for place, part, count in zip(places, parts, itertools.cycle(counts)):
                found[place] = part if count else None
        return found

    def _list_places(self) -> list[list[int]]:
        """Return the numbers of the parameters of each type, which travel as one vector."""
        found: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            found.setdefault(parameter.dtype, []).append(place)
        return list(found.values())

    def _pack(self, gradients: Gradients) -> list[Tensor]:
        """Return per type the gradients and which of them there are; with shards in the row of each."""
        vectors = []
        for places in self._list_places():
            like, own = [self._parameters[n] for n in places], [gradients[n] for n in places]
            used = torch.ones(len(own), dtype=like[0].dtype, device=like[0].device)
            for place in (place for place, gradient in enumerate(own) if gradient is None):
                used[place].fill_(0)  # a copy from the host would wait
            if self._shards is None:
                vectors.append(torch.cat([*map(flatten, own, like), used]))
                continue
            tensors = [nothing_like(p) if g is None else g for p, g in zip(like, own, strict=True)]
            rows = [self._shards.pack(like, tensors), used.expand(self._shards.num_ranks, -1)]
            vectors.append(torch.cat(rows, dim=1).view(-1))
        return vectors


def build_sums(
    parameters: Mapping[int, Sequence[Tensor]],
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    device: torch.device,
    shards: StageShards | None,
    *,
    is_exact: bool,
) -> dict[int, StageSum]:
    """Return the sum of each stage; collective over the data ranks.

    Args:
        parameters: by stage, those that it adds up.
        group: the data ranks, for exact sums alone; `None` for one rank or fast sums.
        shards: of the parameters, if they are sharded.
        is_exact: whether the order of additions is that of the tree.
    """
    axis = None if shards is None else mesh.dp_shard
    replicas = mesh.dp if shards is None else mesh.replicas
    ranks = RankSum(group, device, is_exact=is_exact, shards=axis, replicas=replicas)
    return {stage: StageSum(own, mesh.dp, ranks, shards) for stage, own in parameters.items()}
