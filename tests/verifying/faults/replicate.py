"""Faults of layouts that replicate: between the microbatches of ranks, and in what ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.replicate import Replica
from paceline.train import update
from paceline.train.runners import runner
from paceline.train.runners.runner import Runner
from paceline.train.runners.work import Round, Work
from paceline.train.update import Update


def _reducing(change: Callable[[Any, Callable[[Any], Any]], Any]) -> AbstractContextManager[Any]:
    right = Replica._reduce_bucket

    def reduce(self: Replica, bucket: Any) -> Any:
        return change(bucket, lambda bucket: right(self, bucket))

    return mock.patch.object(Replica, "_reduce_bucket", reduce)


def _give(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


@contextlib.contextmanager
def not_summed_on_one_rank() -> Iterator[None]:
    """Rank 1 joins the collective, then keeps its own gradient."""

    def change(bucket: Any, right: Callable[[Any], Any]) -> Any:
        own = bucket.buffer().clone()
        summed = right(bucket).wait()
        return _give(own if dist.get_rank() == 1 else summed)

    with _reducing(change):
        yield


@contextlib.contextmanager
def averaged_twice() -> Iterator[None]:
    """A mean over ranks on top of the division by the global weight."""
    with _reducing(lambda bucket, right: _give(right(bucket).wait() / dist.get_world_size())):
        yield


@contextlib.contextmanager
def summed_twice() -> Iterator[None]:
    """The sum over ranks is summed over ranks again."""

    def change(bucket: Any, right: Callable[[Any], Any]) -> Any:
        summed = right(bucket).wait()
        dist.all_reduce(summed)
        return _give(summed)

    with _reducing(change):
        yield


@contextlib.contextmanager
def clipped_before_reduction() -> Iterator[None]:
    """Each rank clips its own gradient, then they are summed."""

    def change(bucket: Any, right: Callable[[Any], Any]) -> Any:
        buffer = bucket.buffer()
        buffer.mul_(0.1 / buffer.norm())
        return right(bucket)

    with _reducing(change):
        yield


@contextlib.contextmanager
def microbatch_dropped() -> Iterator[None]:
    """Rank 1 leaves out its first microbatch."""
    right = Update.run

    def run(self: Update, objective: Loss, share: Any, **settings: Any) -> Any:
        if dist.get_rank() == 1:
            share = replace(share, microbatches=share.microbatches[1:], samples=share.samples[1:])
        return right(self, objective, share, **settings)

    with mock.patch.object(Update, "run", run):
        yield


@contextlib.contextmanager
def gradient_overwritten() -> Iterator[None]:
    """Each microbatch's gradient overwrites the one before."""
    right = Runner.forward

    def forward(self: Runner, work: Work, each: Round) -> None:
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.zero_()
        right(self, work, each)

    with mock.patch.object(Runner, "forward", forward):
        yield


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """Backward from each microbatch's mean, as if all had as many targets."""
    right = Update.run

    def run(self: Update, objective: Loss, share: Any, **settings: Any) -> Any:
        def average(output: Any, batch: Any) -> Any:
            total, weight = objective.loss(output, batch)
            mean = total / weight
            return mean + (total - mean).detach(), weight

        return right(self, Objective(objective.forward, average), share, **settings)

    with mock.patch.object(Update, "run", run):
        yield


@contextlib.contextmanager
def dropout_by_rank() -> Iterator[None]:
    """Seeds of microbatches depend on the rank; those of rank 0 are right."""
    right = runner.derive_seed
    with mock.patch.object(runner, "derive_seed", lambda seed, *parts: right(seed + dist.get_rank(), *parts)):
        yield


@contextlib.contextmanager
def wrong_seed() -> Iterator[None]:
    """Seeds of microbatches are another run's."""
    right = runner.derive_seed
    with mock.patch.object(runner, "derive_seed", lambda seed, *parts: right(seed + 1, *parts)):
        yield


@contextlib.contextmanager
def dropout_the_same_every_step() -> Iterator[None]:
    """From the second step on, seeds do not depend on the step."""
    right = runner.derive_seed
    with mock.patch.object(runner, "derive_seed", lambda seed, step, *parts: right(seed, 1, *parts)):
        yield


@contextlib.contextmanager
def statistics_unsynchronised() -> Iterator[None]:
    """Each rank merges only the BatchNorm statistics of its own microbatches."""
    right = RunningStatistics.merge

    def merge(self: RunningStatistics, rows: torch.Tensor) -> None:
        size = len(rows) // dist.get_world_size()
        right(self, rows[dist.get_rank() * size : (dist.get_rank() + 1) * size])

    with mock.patch.object(RunningStatistics, "merge", merge):
        yield


@contextlib.contextmanager
def norm_of_a_part() -> Iterator[None]:
    """The global norm leaves out the first gradient."""
    right = update.measure_norm

    def measure(gradients: Any, parameters: Any, *args: Any, **settings: Any) -> torch.Tensor:
        return right(gradients[1:], parameters[1:], *args, **settings)

    with mock.patch.object(update, "measure_norm", measure):
        yield


@contextlib.contextmanager
def another_start_on_one_rank() -> Iterator[None]:
    """After DDP has broadcast rank 0's weights, rank 1 changes one."""
    right = Replica.__init__

    def init(self: Replica, model: nn.Module, *args: Any, **settings: Any) -> None:
        right(self, model, *args, **settings)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-9

    with mock.patch.object(Replica, "__init__", init):
        yield


@contextlib.contextmanager
def rounded_to_bf16() -> Iterator[None]:
    """Gradients are sent in bf16."""

    def change(bucket: Any, right: Callable[[Any], Any]) -> Any:
        buffer = bucket.buffer()
        buffer.copy_(buffer.bfloat16())
        return right(bucket)

    with _reducing(change):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        not_summed_on_one_rank,
        averaged_twice,
        summed_twice,
        clipped_before_reduction,
        microbatch_dropped,
        gradient_overwritten,
        mean_of_means,
        dropout_by_rank,
        wrong_seed,
        dropout_the_same_every_step,
        statistics_unsynchronised,
        norm_of_a_part,
        another_start_on_one_rank,
        rounded_to_bf16,
    )
}
