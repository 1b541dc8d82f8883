"""Faults of sharding: in what is gathered, summed and cut up among the ranks of dp_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.shard.gradient_exchange import GatherChunks
from paceline.parallel.shard.shards import Shards
from paceline.parallel.sums import gradient_sum
from paceline.train.runners.runner import Runner
from paceline.train.runners.sharded import ShardedRunner
from paceline.train.runners.work import Round, Work


def _summing(change: Callable[..., None]) -> AbstractContextManager[Any]:
    right = gradient_sum.sum_rows

    def sum_rows(chunk: Tensor, rows: Tensor, group: Any) -> None:
        change(right, chunk, rows, group)

    return mock.patch.object(gradient_sum, "sum_rows", sum_rows)


def _gathering(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    right = GatherChunks.__call__

    def gather(
        self: GatherChunks, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return change(self, right, output_tensor, input_tensor, group)

    return mock.patch.object(GatherChunks, "__call__", gather)


@contextlib.contextmanager
def averaged_over_shards() -> Iterator[None]:
    """A mean over dp_shard on top of the division by the global weight."""

    def average(right: Any, chunk: Tensor, rows: Tensor, group: Any) -> None:
        right(chunk, rows, group)
        chunk.div_(group.size())

    with _summing(average):
        yield


@contextlib.contextmanager
def own_gradient_only() -> Iterator[None]:
    """Every rank keeps its chunk of its own gradient, not of the sum."""

    def keep(right: Any, chunk: Tensor, rows: Tensor, group: Any) -> None:
        right(chunk, rows, group)
        chunk.copy_(rows.view(group.size(), -1)[group.rank()])

    with _summing(keep):
        yield


@contextlib.contextmanager
def chunk_of_another_rank() -> Iterator[None]:
    """Each rank keeps the next one's chunk of the sum."""

    def roll(right: Any, chunk: Tensor, rows: Tensor, group: Any) -> None:
        right(chunk, rows.view(group.size(), -1).roll(1, 0).reshape(-1), group)

    with _summing(roll):
        yield


@contextlib.contextmanager
def shard_gradients_in_bf16() -> Iterator[None]:
    """Gradients are sent to their shards in bf16."""

    def narrow(right: Any, chunk: Tensor, rows: Tensor, group: Any) -> None:
        right(chunk, rows.bfloat16().to(rows.dtype), group)

    with _summing(narrow):
        yield


@contextlib.contextmanager
def gathered_in_bf16() -> Iterator[None]:
    """Parameters are gathered from their shards in bf16."""

    def narrow(self: Any, right: Any, output: Tensor, chunk: Tensor, group: Any) -> Any:
        if chunk.is_floating_point():  # bytes otherwise
            return right(self, output, chunk.bfloat16().to(chunk.dtype), group)
        return right(self, output, chunk, group)

    with _gathering(narrow):
        yield


@contextlib.contextmanager
def gathered_once_for_all() -> Iterator[None]:
    """Parameters are gathered once and never again."""
    kept: dict[Any, Tensor] = {}

    def keep(self: Any, right: Any, output: Tensor, chunk: Tensor, group: Any) -> Any:
        if self not in kept:
            work = right(self, output, chunk, group)
            work.wait()
            kept[self] = output.clone()
            return work
        output.copy_(kept[self])
        return None

    with _gathering(keep):
        yield


@contextlib.contextmanager
def sharded_microbatch_dropped() -> Iterator[None]:
    """Under dp_shard, rank 1 leaves out its first microbatch; all ranks agree that it has one fewer."""
    right = ShardedRunner.run

    def run(self: ShardedRunner, work: Work) -> float:
        share = work.share
        owned = (share.num_owned[0], share.num_owned[1] - 1, *share.num_owned[2:])
        share = replace(share, num_owned=owned)
        if dist.get_rank() == 1:
            share = replace(share, microbatches=share.microbatches[1:], samples=share.samples[1:])
        return right(self, replace(work, share=share))

    with mock.patch.object(ShardedRunner, "run", run):
        yield


@contextlib.contextmanager
def gradient_of_a_microbatch_lost() -> Iterator[None]:
    """Rank 1's first microbatch runs, but its gradient is dropped."""
    right = Shards.backward

    def backward(self: Shards, loss: Tensor) -> float:
        return right(self, loss * 0.0 if self._progress.index == 2 else loss)

    with mock.patch.object(Shards, "backward", backward):
        yield


@contextlib.contextmanager
def idle_round_counted() -> Iterator[None]:
    """The gradient of an idle round is counted."""
    right = Shards.backward

    def backward(self: Shards, loss: Tensor) -> float:
        self._progress.index = -1 if self._progress.index is None else self._progress.index
        return right(self, loss)

    with mock.patch.object(Shards, "backward", backward):
        yield


@contextlib.contextmanager
def sharded_gradient_overwritten() -> Iterator[None]:
    """Each round's gradient overwrites the one before."""
    right = Runner.forward

    def forward(self: Runner, work: Work, each: Round) -> None:
        for parameter in self._trained:
            parameter.grad = None
        right(self, work, each)

    with mock.patch.object(Runner, "forward", forward):
        yield


@contextlib.contextmanager
def replicas_not_summed() -> Iterator[None]:
    """The sum over dp_replicate of the shards' gradients is left out."""
    with mock.patch.object(gradient_sum.RankSum, "join", _keep_own):
        yield


def _keep_own(self: Any, row: Tensor) -> None:
    """Right but for the all-reduce of the last round."""


@contextlib.contextmanager
def optimizer_skips_a_shard() -> Iterator[None]:
    """On rank 1 the optimizer's step changes no weight."""
    right = Shards.step

    def step(self: Shards, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.detach().to_local().clone() for parameter in parameters]
        right(self, optimizer)
        if dist.get_rank() == 1:
            for parameter, values in zip(parameters, before, strict=True):
                parameter.detach().to_local().copy_(values)

    with mock.patch.object(Shards, "step", step):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        averaged_over_shards,
        own_gradient_only,
        chunk_of_another_rank,
        shard_gradients_in_bf16,
        gathered_in_bf16,
        gathered_once_for_all,
        sharded_microbatch_dropped,
        gradient_of_a_microbatch_lost,
        idle_round_counted,
        sharded_gradient_overwritten,
        replicas_not_summed,
        optimizer_skips_a_shard,
    )
}
