"""Gathers sharded parameters, and sums gradients so that each rank keeps its chunk.

torch's `fully_shard` takes objects for both collectives. It passes a reduce-scatter one flat vector per group
of parameters, `[num_shards, chunk]`, whose row s is the chunk of rank s of dp_shard. Every group has a
`ChunkSum` of its own. All of them share one `StepProgress`, which knows the microbatch.

Fast: the sum over dp_shard after every microbatch; then, once per step, the all-reduce of the chunk over
dp_replicate.

Exact: after every microbatch, each rank gets its chunk of the vectors of all ranks of dp_shard, and adds
these in the order of the tree of `comm/tree.py`. The ranks take microbatches in turns, so what one round
brings are neighbours in the tree, and few chunks have to be kept. The last call sums over replicas, in the
same order. Until then the call returns -0.0, which changes no bit when it is added. So the bits are those of
replicas and of one process: padding is zero everywhere, and every number is added in its own place,
independent of its neighbours.

With zero=1 and with ep, whole vectors are kept and added up to the step's last microbatch.

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

from paceline.comm.one_tensor import all_gather
from paceline.comm.tree import TreeSum
from paceline.comm.tree_exchange import nothing_like
from paceline.data.share import list_numbers
from paceline.parallel.sums.gradient_sum import GradientSum, RankSum
from paceline.parallel.sums.gradients import keep_for_stream, list_present
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
        scale: the factor of the round's gradients; 0 drops them, whatever they are.
        num_owned: per rank of dp, the number of microbatches that it computes in this step.
        turns: how many ranks take microbatches in turns, see `data.share.list_numbers`.
        number: of the round in the step.
        waited_s: seconds spent in collectives since it was last set to 0.
        signature: a number derived from the groups that were gathered and reduced in this step, in order.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self.index: int | None = None
        self.is_last = False
        self.silent = False
        self.scale = 1.0
        self.num_owned: tuple[int, ...] = ()
        self.turns = 1
        self.number = -1
        self.waited_s = 0.0
        self.signature = 0

    def begin(self, num_owned: tuple[int, ...], turns: int) -> None:
        """Start a step."""
        self.num_rounds = max(num_owned, default=0)
        self.num_owned, self.turns, self.number = num_owned, turns, -1
        self.signature = 0
        self.scale = 1.0

    def list_leaves(self, ranks: range) -> list[int | None]:
        """Return the microbatch that each of some ranks of dp has in this round."""
        own = [list_numbers(self.num_owned, self.turns, rank) for rank in ranks]
        return [each[self.number] if self.number < len(each) else None for each in own]

    def apply_scale(self, gradients: Tensor) -> None:
        """Multiply gradients of this round by its scale, in place."""
        if self.scale == 0.0:
            gradients.zero_()
        elif self.scale != 1.0:
            gradients.mul_(self.scale)

    def note(self, number: int) -> None:
        """Add a collective of a group to the signature."""
        self.signature = (self.signature * _MULTIPLIER + number + 1) & (2**63 - 1)


class GatherChunks(AllGather):
    """The all-gather of one group's parameters.

    Args:
        on_cpu: whether the model is on the CPU. Then the gather always runs asynchronously, so that a
            prefetched one overlaps with compute; fully_shard waits for it before the parameters are used.

    Communication: (n-1)/n times the group's bytes, received by every rank of dp_shard.
    """

    def __init__(self, progress: StepProgress, number: int, on_cpu: bool) -> None:
        self._progress = progress
        self._number = number
        self._on_cpu = on_cpu

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._progress.silent:
            # Numbers of the right size, for timing: this rank's own, in place of every rank's.
            rows = output_tensor.view(group.size(), -1)
            for number, row in enumerate(rows):
                if number != group.rank():
                    row.copy_(input_tensor)
            return None
        self._progress.note(2 * self._number)
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op or self._on_cpu)
        return _TimedWork(work, self._progress) if self._on_cpu else work


class _TimedWork(dist.Work):
    """A collective in progress on the CPU; the time that a rank waits for it is counted."""

    def __init__(self, work: dist.Work, progress: StepProgress) -> None:
        super().__init__()
        self._work = work
        self._progress = progress

    def wait(self, *args: Any) -> bool:
        started_s = time.perf_counter()
        done = self._work.wait(*args)
        self._progress.waited_s += time.perf_counter() - started_s
        return done


class ChunkSum(ReduceScatter):
    """The sum of one group's gradients over all ranks of dp.

    Args:
        ranks: sums over the ranks of dp.

    Attributes:
        is_complete: whether the sum of this step is known.

    Communication, fast: per call (n-1)/n times the group's bytes sent by every rank of dp_shard, and in the
    last call of a step an all-reduce of 1/n of them over dp_replicate. Exact: the same per call, and in the
    last one an exchange of 1/n of them, see `comm/tree_exchange.py`.
    """

    def __init__(self, progress: StepProgress, number: int, ranks: RankSum) -> None:
        self.is_complete = False
        self._progress = progress
        self._number = number
        self._ranks = ranks
        self._sum = GradientSum(ranks, list_present)
        self._rows = TreeSum[Tensor](0, Tensor.add_)
        self._partial: Tensor | None = None

    def begin(self) -> None:
        """Start a step."""
        self.is_complete, self._partial = False, None
        self._sum.begin(self._progress.num_owned, self._progress.turns)
        self._rows = TreeSum(sum(self._progress.num_owned), Tensor.add_)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        progress, is_exact = self._progress, self._ranks.is_exact
        self.is_complete = progress.is_last
        progress.apply_scale(input_tensor)
        if self._ranks.sends_rows:
            started_s = time.perf_counter()
            self._send_rows(input_tensor, output_tensor)
            progress.waited_s += time.perf_counter() - started_s
            return
        if is_exact and progress.index is not None:
            # fully_shard drops the vector after the call, and nothing else is written into it.
            self._sum.add(progress.index, [input_tensor])
        if is_exact and not progress.is_last:
            output_tensor.copy_(nothing_like(output_tensor))
        elif progress.silent:
            self._sum.take()
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        else:
            progress.note(2 * self._number + 1)
            started_s = time.perf_counter()
            if not is_exact:
                self._sum_now(input_tensor, output_tensor)
            elif sum(progress.num_owned):
                [row] = self._sum.finish([input_tensor])
                output_tensor.copy_(row)
                keep_for_stream(row)
            else:
                output_tensor.zero_()
            progress.waited_s += time.perf_counter() - started_s

    def _send_rows(self, vector: Tensor, chunk: Tensor) -> None:
        """Add this rank's chunk of the round's vectors; return the sum in the last round."""
        progress, ranks = self._progress, self._ranks
        if progress.silent:
            chunk.copy_(vector.view(ranks.num_shards, -1)[ranks.shard])
            return
        progress.note(2 * self._number + 1)
        first = ranks.rank - ranks.rank % ranks.num_shards
        leaves = progress.list_leaves(range(first, first + ranks.num_shards))
        arrived = ranks.send_rows(vector)
        for leaf, row in zip(leaves, arrived, strict=True):
            if leaf is not None:
                self._rows.push((leaf, leaf + 1), row)
        if not progress.is_last:
            self._rows.replace(_copy_out)
            chunk.copy_(nothing_like(chunk))
            return
        rows, self._rows = [row for _, row in self._rows.subtrees], TreeSum(0, Tensor.add_)
        if sum(progress.num_owned):
            ranks.join_subtrees(rows, progress.num_owned, chunk)
        else:
            chunk.zero_()

    def _sum_now(self, vector: Tensor, chunk: Tensor) -> None:
        self._ranks.scatter(vector, chunk)
        if not self._ranks.has_replicas:
            return
        # fully_shard adds what each call returns to the gradient. Replicas are summed once per step, so the
        # sums of earlier rounds wait here, and their calls return -0.0, which adds nothing.
        if self._partial is not None:
            chunk.add_(self._partial)
            keep_for_stream(self._partial)
            self._partial = None
        if self._progress.is_last:
            self._ranks.join(chunk)
            return
        self._partial = chunk.clone()
        chunk.copy_(nothing_like(chunk))


def _copy_out(row: Tensor) -> Tensor:
    """Return a row whose memory holds nothing else; a view would keep the chunks of all ranks."""
    is_view = row.numel() * row.element_size() < row.untyped_storage().nbytes()
    return row.clone() if is_view else row
