"""The exact reduction under everything that could bring ranks out of step, against one process."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from paceline.comm import tree_exchange
from paceline.parallel.sums.buckets import BucketSums
from paceline.parallel.sums.gradients import flatten, view_as
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError
from tests.train.cases import Trained, take_steps

WIDTH = 24
GLOBAL_BATCH, MICROBATCH = 10, 2


class Deep(nn.Module):
    """Twelve layers, a bucket for each; a weight that is used twice; a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.filter = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        image = self.filter(x.view(-1, 2, 3, 4)).flatten(1)
        output: Tensor = self.head(self.layers[0](image))
        return output


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    return x, torch.randn(GLOBAL_BATCH, 3, generator=generator) * x.abs().amax(1, keepdim=True)


class Steps:
    """A data set of 200 global batches."""

    def __len__(self) -> int:
        return 200 * GLOBAL_BATCH

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        x, y = batch(place // GLOBAL_BATCH)
        return x[place % GLOBAL_BATCH], y[place % GLOBAL_BATCH]


def delay_everything(chance: random.Random) -> Callable[[], None]:
    """Random waits before a bucket is handed in, before it is worked on, and between messages."""
    reduce_bucket, pass_on = BucketSums.reduce_bucket, tree_exchange.pass_on

    def wait() -> None:
        if chance.random() < 0.15:
            time.sleep(chance.expovariate(1 / 0.001))

    def reduce_late(self: BucketSums, bucket: GradBucket) -> Any:
        wait()
        return reduce_bucket(self, bucket)

    def pass_on_late(*args: Any) -> int:
        wait()
        sent_bytes = pass_on(*args)
        wait()
        return sent_bytes

    BucketSums.reduce_bucket = reduce_late  # type: ignore[method-assign]
    tree_exchange.pass_on = pass_on_late

    def undo() -> None:
        BucketSums.reduce_bucket = reduce_bucket  # type: ignore[method-assign]
        tree_exchange.pass_on = pass_on

    return undo


def train_deep(world: Any, num_steps: int, delays: bool) -> tuple[Trained, int]:
    torch.manual_seed(1)
    undo = delay_everything(random.Random(world.rank)) if delays else lambda: None
    try:
        trainer = Trainer(
            Deep(),
            forward=lambda model, batch: model(batch[0]),
            loss=lambda output, batch: ((output - batch[1]).square().sum(), len(output)),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
            microbatch_size=MICROBATCH,
            clip_norm=0.5,
            reduction="exact",
            ddp={"bucket_cap_mb": 0.001},
        )
        seen: list[int] = []
        trainer.on_gradients(lambda named: seen.append(len(named)))
        trained = take_steps(
            trainer,
            trainer.loader(Steps(), global_batch_size=GLOBAL_BATCH, shuffle=False, epochs=1),
            num_steps,
        )
        replica = trainer._updates["model"].runner._replica
        assert len(seen) == num_steps
        return trained, 0 if replica is None else count_buckets(replica)
    finally:
        undo()


def count_buckets(replica: Any) -> int:
    data = replica._ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return len(sizes.split(","))


@pytest.fixture(scope="module")
def alone(ranks: Pool) -> Callable[[int], Trained]:
    @functools.cache
    def train(num_steps: int) -> Trained:
        ((trained, _),) = ranks.run(train_deep, 1, (num_steps, False), timeout_s=60)
        assert isinstance(trained, Trained)
        return trained

    return train


@pytest.mark.parametrize("nproc", [2, 3])
def test_two_hundred_delayed_steps_have_the_bits_of_one_process(
    ranks: Pool, alone: Callable[[int], Trained], nproc: int
) -> None:
    expected = alone(200)
    for trained, num_buckets in ranks.run(train_deep, nproc, (200, True), timeout_s=100):
        assert num_buckets >= 8
        assert trained.losses == expected.losses
        assert trained.grad_norms == expected.grad_norms
        assert trained.hash == expected.hash


@pytest.mark.parametrize("nproc", [6, 8])
def test_ranks_without_microbatches_change_nothing(
    ranks: Pool, alone: Callable[[int], Trained], nproc: int
) -> None:
    """A global batch has five microbatches."""
    expected = alone(20)
    for trained, _ in ranks.run(train_deep, nproc, (20, False), timeout_s=60):
        assert (trained.losses, trained.hash) == (expected.losses, expected.hash)


def die_in_a_bucket(world: Any) -> None:
    reduce_bucket, calls = BucketSums.reduce_bucket, itertools.count()

    def reduce_or_die(self: BucketSums, bucket: GradBucket) -> Any:
        if world.rank == 1 and next(calls) == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce_bucket(self, bucket)

    BucketSums.reduce_bucket = reduce_or_die  # type: ignore[method-assign]
    try:
        train_deep(world, 20, False)
    finally:
        BucketSums.reduce_bucket = reduce_bucket  # type: ignore[method-assign]


def test_a_rank_that_dies_in_a_bucket_is_reported_on_the_others(ranks: Pool) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(die_in_a_bucket)
    assert caught.value.exit_codes == {1: -signal.SIGKILL}
    assert re.search("Connection (closed|reset) by peer", caught.value.reports[0])
    assert "sum_subtrees" in caught.value.reports[0], "where this rank was"
    assert time.monotonic() - started_s < 15


@pytest.mark.parametrize("like", [torch.empty(2, 3, 4, 5), torch.empty(2, 4, 5, 3).permute(0, 3, 1, 2)])
def test_flattening_follows_the_memory_of_the_parameter(like: Tensor) -> None:
    gradient = torch.randn(2, 3, 4, 5)
    in_memory = torch.empty_like(like).copy_(gradient).as_strided((120,), (1,))
    assert torch.equal(flatten(gradient, like), in_memory)
    assert torch.equal(flatten(torch.empty_like(like).copy_(gradient), like), in_memory)
    assert torch.equal(view_as(in_memory, like), gradient)
    assert view_as(in_memory, like).stride() == like.stride()
    assert torch.equal(flatten(None, like), torch.zeros(120))


def test_a_parameter_with_gaps_is_flattened_in_the_order_of_its_dimensions() -> None:
    """As DDP does."""
    like = torch.empty(4, 6)[:, ::2].t()
    assert torch.equal(flatten(torch.arange(12.0).view(3, 4), like), torch.arange(12.0))
