"""Gathers sharded parameters, and sums gradients so that each rank keeps its chunk.

torch's `fully_shard` takes objects for both collectives. It passes a reduce-scatter one flat vector per group
of parameters, `[num_shards, chunk]`, whose row s is the chunk of rank s of dp_shard. Every group has a
`SumChunks` or an `ExactChunks` of its own. All of them share one `StepProgress`, which knows the microbatch.

Fast (`SumChunks`): the sum over dp_shard after every microbatch; then, once per step, the all-reduce of the
chunk over dp_replicate. On a CPU the sum is an all-to-all and a local addition: gloo's own reduce-scatter
takes 2 to 3 times as long for the same bytes (1 to 24 MiB on 2 and 4 ranks).

Exact (`ExactChunks`): nothing is sent before the step's last microbatch. Each microbatch's flat vector is
kept and added in the order of the tree of `comm/tree.py`. The last call sums the subtrees of all ranks of dp,
replicas included, in that order. Until then the call returns -0.0, which changes no bit when it is added. So
the bits are those of `parallel/exact.py` and of one process: padding is zero everywhere, and every number is
added in its own place, independent of its neighbours.

Order of the collectives: fully_shard calls these objects one after the other, from the thread that runs
backward and in the order of the groups. A call returns when its collectives are done (on CUDA: are on their
stream). The exact exchange has a group of its own, so it cannot be mismatched with a prefetched all-gather.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import all_gather, reduce_scatter
from paceline.comm.exchange import Exchange, nothing_like
from paceline.comm.tree import ReductionPlan, TreeSum, plan_reduction
from paceline.torch_seams.fsdp import AllGather, ReduceScatter

# Combines the numbers of groups into one; any odd 64-bit constant works (this one is Knuth's).
_MULTIPLIER = 6364136223846793005


class StepProgress:
    """The progress of one optimizer step on this rank.

    A round is a forward and backward of all ranks at once. A rank with fewer microbatches than others has
    idle rounds: it gathers and sums along with them, but its own gradients do not count.

    Attributes:
        num_rounds: of the step: the largest number of microbatches that a rank owns.
        index: the number within the global batch of the round's microbatch; `None` in an idle round.
        is_last: whether the step's gradients are complete after this round.
        silent: whether nothing is sent, see `Shards.silenced`.
        num_owned: per rank of dp, the number of microbatches that it computes in this step.
        plan: the order in which the exact reduction adds the microbatches.
        waited_s: seconds spent in collectives since it was last set to 0.
        signature: a number derived from the groups that were gathered and reduced in this step, in order.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self.index: int | None = None
        self.is_last = False
        self.silent = False
        self.num_owned: tuple[int, ...] = ()
        self.plan: ReductionPlan | None = None
        self.waited_s = 0.0
        self.signature = 0

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a step."""
        self.num_rounds = max(num_owned, default=0)
        self.num_owned = num_owned
        self.plan = plan_reduction(num_owned)
        self.signature = 0

    def note(self, number: int) -> None:
        """Add a collective of a group to the signature."""
        self.signature = (self.signature * _MULTIPLIER + number + 1) & (2**63 - 1)


class GatherChunks(AllGather):
    """The all-gather of one group's parameters.

    Args:
        rounds: of this model.
        number: of the group.
        on_cpu: whether the model is on the CPU. Then the gather always runs asynchronously, so that a
            prefetched one overlaps with compute; fully_shard waits for it before the parameters are used.

    Communication: (n-1)/n times the group's bytes, received by every rank of dp_shard.
    """

    def __init__(self, rounds: StepProgress, number: int, on_cpu: bool) -> None:
        self._rounds = rounds
        self._number = number
        self._on_cpu = on_cpu

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._rounds.silent:
            # Numbers of the right size, for timing: this rank's own, in place of every rank's.
            rows = output_tensor.view(group.size(), -1)
            for number, row in enumerate(rows):
                if number != group.rank():
                    row.copy_(input_tensor)
            return None
        self._rounds.note(2 * self._number)
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op or self._on_cpu)
        return _TimedWork(work, self._rounds) if self._on_cpu else work


class _TimedWork(dist.Work):
    """A collective in progress on the CPU; the time that a rank waits for it is counted."""

    def __init__(self, work: dist.Work, rounds: StepProgress) -> None:
        super().__init__()
        self._work = work
        self._rounds = rounds

    def wait(self, *args: Any) -> bool:
        started_s = time.perf_counter()
        done = self._work.wait(*args)
        self._rounds.waited_s += time.perf_counter() - started_s
        return done


class GradientChunks(ReduceScatter):
    """The sum of one group's gradients over ranks; its subclasses differ in the order of additions.

    Args:
        rounds: of this model.
        number: of the group.
    """

    def __init__(self, rounds: StepProgress, number: int) -> None:
        self._rounds = rounds
        self._number = number
        self._is_summed = False

    def begin(self) -> None:
        """Forget the sums of the previous step."""
        self._is_summed = False

    @property
    def is_complete(self) -> bool:
        """Whether the sum of this step is known."""
        return self._is_summed

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class SumChunks(GradientChunks):
    """The sum of one group's gradients over dp_shard, then over dp_replicate.

    Args:
        rounds: of this model.
        number: of the group.
        replicas: the ranks of dp_replicate; `None` if there is one replica.

    Communication per call: (n-1)/n times the group's bytes sent by every rank of dp_shard. On the last call
    of a step also an all-reduce of 1/n of them over dp_replicate.
    """

    def __init__(self, rounds: StepProgress, number: int, replicas: dist.ProcessGroup | None) -> None:
        super().__init__(rounds, number)
        self._replicas = replicas
        self._partial: Tensor | None = None

    def begin(self) -> None:
        super().begin()
        self._partial = None

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
        if rounds.silent:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
            return
        rounds.note(2 * self._number + 1)
        started_s = time.perf_counter()
        sum_rows(output_tensor, input_tensor, group)
        if self._replicas is not None:
            self._sum_replicas(output_tensor)
        rounds.waited_s += time.perf_counter() - started_s

    def _sum_replicas(self, chunk: Tensor) -> None:
        # fully_shard adds what each call returns to the gradient. Replicas are summed once per step, so the
        # sums of earlier rounds wait here, and their calls return -0.0, which adds nothing.
        if self._partial is not None:
            chunk.add_(self._partial)
            _keep_for_stream(self._partial)
            self._partial = None
        if self._rounds.is_last:
            dist.all_reduce(chunk, group=self._replicas)
            return
        self._partial = chunk.clone()
        chunk.copy_(nothing_like(chunk))


class ExactChunks(GradientChunks):
    """The sum of one group's gradients over all ranks of dp, in the order of the tree.

    Args:
        rounds: of this model.
        number: of the group.
        exchange: sums the subtrees of all ranks of dp.
        shard: this rank's number in dp_shard.

    Memory: up to log2(microbatches of the rank) + 1 flat vectors of the group between the microbatches.
    """

    def __init__(self, rounds: StepProgress, number: int, exchange: ChunkExchange, shard: int) -> None:
        super().__init__(rounds, number)
        self._exchange = exchange
        self._shard = shard
        self._sum: TreeSum[Tensor] = TreeSum(0, _add)

    def begin(self) -> None:
        super().begin()
        assert self._rounds.plan is not None
        self._sum = TreeSum(self._rounds.plan.num_leaves, _add)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rounds = self._rounds
        if rounds.index is not None:
            # fully_shard drops the vector after the call, and nothing else is written into it.
            self._sum.push((rounds.index, rounds.index + 1), input_tensor)
        self._is_summed = rounds.is_last
        if not rounds.is_last:
            output_tensor.copy_(nothing_like(output_tensor))
            return
        subtrees = [value for _, value in self._sum.subtrees]
        self._sum = TreeSum(0, _add)
        if rounds.silent:
            own = input_tensor.view(group.size(), -1)[self._shard]
            output_tensor.copy_(own)
            return
        rounds.note(2 * self._number + 1)
        assert rounds.plan is not None
        started_s = time.perf_counter()
        if rounds.plan.num_leaves:
            self._exchange.sum_chunk(subtrees, rounds.plan, input_tensor, output_tensor)
        else:
            output_tensor.zero_()
        for subtree in subtrees:
            _keep_for_stream(subtree)
        rounds.waited_s += time.perf_counter() - started_s


class ChunkExchange:
    """A sum of vectors over all ranks of dp in the order of a tree; each rank gets the chunk of its shard.

    Args:
        exchange: sums whole vectors over all ranks of dp.
        num_shards, shard: degree of dp_shard, and this rank's number in it.
    """

    def __init__(self, exchange: Exchange, num_shards: int, shard: int) -> None:
        self.exchange = exchange
        self._num_shards = num_shards
        self._shard = shard

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this rank has sent to others so far."""
        return self.exchange.sent_bytes

    def sum_chunk(self, subtrees: list[Tensor], plan: ReductionPlan, scratch: Tensor, chunk: Tensor) -> None:
        """Sum the subtrees of all ranks; collective.

        Args:
            subtrees: this rank's, flat, `[num_shards * chunk]`; overwritten.
            plan: the subtrees of each rank, and the order in which they are added.
            scratch: as long as a subtree; overwritten. May be one of them.
            chunk: receives this rank's part of the sum.
        """
        total = subtrees[-1] if subtrees else scratch
        self.exchange.sum_subtrees([[subtree] for subtree in subtrees], plan, total)
        chunk.copy_(total.view(self._num_shards, -1)[self._shard])


def sum_rows(chunk: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    """Sum row r of all ranks' `rows` [num_ranks, chunk] into the `chunk` of rank r."""
    if rows.is_cuda:
        reduce_scatter(chunk, rows, group=group)
        return
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    torch.sum(arrived.view(group.size(), -1), dim=0, out=chunk)


def _add(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum, computed in place of `right`."""
    right.add_(left)
    _keep_for_stream(left)
    return right


def _keep_for_stream(tensor: Tensor) -> None:
    """Keep a tensor's memory until the current stream has read it, before the host drops the tensor."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
