"""Sums the gradients of a stage: over its microbatches, then over the data ranks.

Backwards of microbatches may come in any order. Two classes differ in the order of the additions:

- `OrderedStageSum` sets gradients aside per microbatch and adds them in the order of the tree, as without pp
  (`parallel/exact.py`). The bits therefore do not depend on the layout.
- `QuickStageSum` adds them as they come. Its sum over the data ranks runs while other stages still compute.
- `CutStageSum` does so if the parameters are sharded. With `zero` 2 and 3 it sums each microbatch over
  dp_shard and keeps this rank's rows alone; a rank without a microbatch left takes part with zeros.

Which parameters got a gradient travels with the sums, as one number per parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange, nothing_like
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.mesh import Axis, Mesh
from paceline.parallel.exact import Gradients, add_gradients, settle_conjugates
from paceline.parallel.shard.gradient_exchange import sum_rows
from paceline.parallel.stages.shards import StageShards


class StageSum(ABC):
    """The gradients of the parameters that one stage adds up.

    Args:
        parameters: to train; those that this stage is the first to use.
        dp: the data ranks.
        shards: of the parameters, which get the sums; `None` if they are not sharded.

    Usage per step: `begin`; per microbatch `take` and `put`; `start_sum` once `is_complete`; `end`.
    """

    def __init__(self, parameters: Sequence[Tensor], dp: Axis, shards: StageShards | None = None) -> None:
        self._parameters = list(parameters)
        self._dp = dp
        self._shards = shards
        self._num_owned: tuple[int, ...] = ()
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
        self._num_owned = num_owned
        self._num_left = num_owned[self._dp.rank]

    def take(self) -> Gradients:
        """Return the gradients that the parameters have, and take them off."""
        settle_conjugates(self._parameters)
        gradients: Gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def put(self, index: int, gradients: Gradients) -> None:
        """Add the gradients of a microbatch, by its number in the global batch, to the sum."""
        self._num_left -= 1
        self._add(index, gradients)

    @abstractmethod
    def _add(self, index: int, gradients: Gradients) -> None:
        """Add the gradients of a microbatch."""

    @abstractmethod
    def start_sum(self) -> None:
        """Start the sum over the data ranks, if it can run beside computations; all of them must call it."""

    @torch.no_grad()
    def end(self) -> None:
        """Put the sums into the parameters; collective over the data ranks."""
        total: Gradients = [None] * len(self._parameters)
        if self._parameters and sum(self._num_owned):
            total = self._finish()
        for parameter, gradient in zip(self._parameters, total, strict=True):
            if self._shards is None:
                parameter.grad = gradient
            else:
                self._shards.keep_gradient(parameter, gradient)

    @abstractmethod
    def _finish(self) -> Gradients:
        """Return the sums over the data ranks; of a sharded parameter this rank's rows."""

    def _list_places(self) -> list[tuple[torch.dtype, list[int]]]:
        """Return the numbers of the parameters of each type, which travel as one vector."""
        found: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            found.setdefault(parameter.dtype, []).append(place)
        return list(found.items())

    def _read(self, total: Tensor, places: list[int], found: Gradients) -> None:
        """Put the gradients that a vector holds into `found`; those that no rank has stay `None`."""
        lengths = [self._parameters[place].numel() for place in places]
        parts = torch.split(total[: sum(lengths)], lengths)
        used = total[sum(lengths) :].tolist()
        for place, part, count in zip(places, parts, used, strict=True):
            if count:
                found[place] = _view_as(part, self._parameters[place])


class OrderedStageSum(StageSum):
    """A sum in the order of the tree over the microbatches of the global batch.

    Args:
        parameters, dp, shards: as for `StageSum`.
        exchange: over the data ranks; `None` for one.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dp: Axis,
        exchange: Exchange | None,
        shards: StageShards | None = None,
    ) -> None:
        super().__init__(parameters, dp, shards)
        self._exchange = exchange
        self._waiting: dict[int, Gradients] = {}
        self._next = 0
        self._sum: TreeSum[Gradients] = TreeSum(0, add_gradients)

    def begin(self, num_owned: tuple[int, ...]) -> None:
        super().begin(num_owned)
        self._next = sum(num_owned[: self._dp.rank])
        self._waiting = {}
        self._sum = TreeSum(sum(num_owned), add_gradients)

    def _add(self, index: int, gradients: Gradients) -> None:
        if not self._parameters:
            return
        self._waiting[index] = gradients
        while self._next in self._waiting:
            self._sum.push((self._next, self._next + 1), self._waiting.pop(self._next))
            self._next += 1

    def start_sum(self) -> None:
        """Do nothing: an ordered sum is computed at the end."""

    def _finish(self) -> Gradients:
        own = [gradients for _, gradients in self._sum.subtrees]
        self._sum = TreeSum(0, add_gradients)
        if self._exchange is None:
            [total] = own
            return total
        plan = plan_reduction(self._num_owned)
        found: Gradients = [None] * len(self._parameters)
        for dtype, places in self._list_places():
            like = [self._parameters[place] for place in places]
            length = sum(p.numel() for p in like) + len(places)
            flat = [[_flatten([gradients[place] for place in places], like)] for gradients in own]
            total_of_type = torch.empty(length, dtype=dtype, device=like[0].device)
            self._exchange.sum_subtrees(flat, plan, total_of_type)
            self._read(total_of_type, places, found)
        if self._shards is None:
            return found
        pairs = zip(self._parameters, found, strict=True)
        return [None if g is None else self._shards.cut(p, g) for p, g in pairs]


class QuickStageSum(StageSum):
    """A sum in the order in which backwards end, then over the data ranks by an all-reduce.

    Args:
        parameters, dp: as for `StageSum`.

    Memory: one gradient per parameter besides the current one.
    """

    def __init__(self, parameters: Sequence[Tensor], dp: Axis) -> None:
        super().__init__(parameters, dp)
        self._sum: Gradients = [None] * len(self._parameters)
        self._sent: list[tuple[list[int], Tensor, dist.Work | None]] = []

    def begin(self, num_owned: tuple[int, ...]) -> None:
        super().begin(num_owned)
        self._sum = [None] * len(self._parameters)
        self._sent = []

    def _add(self, index: int, gradients: Gradients) -> None:
        self._sum = add_gradients(gradients, self._sum)

    def start_sum(self) -> None:
        if self._dp.size == 1 or not sum(self._num_owned):
            return
        for _, places in self._list_places():
            flat = _flatten([self._sum[place] for place in places], [self._parameters[p] for p in places])
            self._sent.append((places, flat, dist.all_reduce(flat, group=self._dp.group, async_op=True)))

    def _finish(self) -> Gradients:
        if self._dp.size == 1:
            return self._sum
        found: Gradients = [None] * len(self._parameters)
        for places, flat, work in self._sent:
            if work is not None:
                work.wait()
            self._read(flat, places, found)
        return found


class CutStageSum(StageSum):
    """A sum of sharded gradients in the order in which backwards end.

    Args:
        parameters, dp, shards: as for `StageSum`.
        mesh: the ranks.

    Communication: (n-1)/n of the gradients sent over n = dp_shard ranks, per step with `zero` 1 and per
    microbatch else; and an all-reduce of 1/n of them over dp_replicate per step.
    """

    def __init__(self, parameters: Sequence[Tensor], mesh: Mesh, shards: StageShards) -> None:
        super().__init__(parameters, mesh.dp, shards)
        self._cuts = shards
        self._mesh = mesh
        self._sum: Gradients = [None] * len(self._parameters)
        self._rows: dict[torch.dtype, Tensor] = {}

    def begin(self, num_owned: tuple[int, ...]) -> None:
        super().begin(num_owned)
        if self._cuts.zero > 1:
            self._num_left = max(num_owned, default=0)
        self._sum, self._rows = [None] * len(self._parameters), {}

    def add_nothing(self) -> None:
        """Take part in the sum over dp_shard of a microbatch that this rank does not have."""
        self._num_left -= 1
        with torch.no_grad():
            self._add(-1, [None] * len(self._parameters))

    def _add(self, index: int, gradients: Gradients) -> None:
        self._sum = add_gradients(gradients, self._sum)
        if self._cuts.zero > 1:
            self._cut_sum()

    def start_sum(self) -> None:
        """Do nothing: the sums of microbatches have been sent already, or are at the end."""

    def _cut_sum(self) -> None:
        """Sum what was added since the last call over dp_shard, and keep this rank's rows."""
        for dtype, places in self._list_places():
            like = [self._parameters[place] for place in places]
            own = [self._sum[place] for place in places]
            tensors = [nothing_like(p) if g is None else g for p, g in zip(like, own, strict=True)]
            used = _mark_used(own, dtype, like[0].device)
            packed = torch.cat([self._cuts.pack(like, tensors), used.expand(self._cuts.num_ranks, -1)], dim=1)
            rows = packed.new_empty(packed.shape[1])
            sum_rows(rows, packed, self._mesh.dp_shard.group)
            before = self._rows.get(dtype)
            self._rows[dtype] = rows if before is None else before.add_(rows)
        self._sum = [None] * len(self._parameters)

    def _finish(self) -> Gradients:
        if self._cuts.zero == 1:
            self._cut_sum()
        found: Gradients = [None] * len(self._parameters)
        for dtype, places in self._list_places():
            rows = self._rows[dtype]
            if self._mesh.replicas.size > 1:
                dist.all_reduce(rows, group=self._mesh.replicas.group)
            parts = self._cuts.unpack(rows, [self._parameters[place] for place in places])
            for place, part, count in zip(places, parts, rows[-len(places) :].tolist(), strict=True):
                found[place] = part if count else None
        self._rows = {}
        return found


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
        mesh: the ranks.
        group: the data ranks, for exact sums alone; `None` for one rank or fast sums.
        device: of the model.
        shards: of the parameters, if they are sharded.
        is_exact: whether the order of additions is that of the tree.
    """
    if is_exact:
        exchange: Exchange | None = None
        if group is not None:
            exchange = Exchange(group, device)
        return {stage: OrderedStageSum(own, mesh.dp, exchange, shards) for stage, own in parameters.items()}
    if shards is not None:
        return {stage: CutStageSum(own, mesh, shards) for stage, own in parameters.items()}
    return {stage: QuickStageSum(own, mesh.dp) for stage, own in parameters.items()}


def _mark_used(gradients: Gradients, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([float(g is not None) for g in gradients], dtype=dtype, device=device)


def _flatten(gradients: Gradients, like: list[Tensor]) -> Tensor:
    parts = [
        (nothing_like(p) if g is None else g).permute(_memory_order(p)).reshape(-1)
        for g, p in zip(gradients, like, strict=True)
    ]
    return torch.cat([*parts, _mark_used(gradients, parts[0].dtype, parts[0].device)])


def _view_as(part: Tensor, like: Tensor) -> Tensor:
    order = _memory_order(like)
    whole = part.view([like.shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(like.dim())])


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
