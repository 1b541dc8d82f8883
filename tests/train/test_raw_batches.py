"""`trainer.step` on batches that do not come from `trainer.loader`: each rank brings its own samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.mesh import Axis
from paceline.train.batches import RawBatches
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import Trained, apart, assert_ranks_agree, take_steps, tensors_apart

NUM_STEPS = 4


def samples(step: int) -> Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def pack(x: Tensor, kind: str) -> Any:
    """Return the same samples in several nests of tensors; a scalar is for all samples."""
    targets = x.sum(1)
    match kind:
        case "tensor":
            return x
        case "dict":
            return {"x": x, "more": [targets, {"scale": torch.tensor(1.0)}]}
        case _:
            return (x, targets)


def unpack(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        assert len(batch["more"][0]) == len(batch["x"])
        assert batch["more"][1]["scale"].dim() == 0
        return batch["x"]
    return batch[0] if isinstance(batch, tuple) else batch


def build(microbatch_size: int | None, dropout: float = 0.0) -> Trainer:
    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))

    return Trainer(
        build_model,
        forward=lambda model, batch: model(unpack(batch)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        dtype="fp64",
        microbatch_size=microbatch_size,
    )


def train(world: Any, kind: str, counts: list[int], microbatch_size: int | None) -> Trained:
    """Each rank has so many of the 7 samples of a step."""
    start = sum(counts[: world.rank])
    trainer = build(microbatch_size)
    batches = [pack(samples(step)[start : start + counts[world.rank]], kind) for step in range(NUM_STEPS)]
    trained = take_steps(trainer, batches)
    trained.extra = trainer.num_samples
    return trained


@pytest.mark.parametrize("kind", ["tensor", "dict", "tuple"])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_uneven_and_empty_shares_are_one_global_batch(
    ranks: Pool, kind: str, microbatch_size: int | None
) -> None:
    one = ranks.run(train, nproc=1, args=(kind, [7], microbatch_size))[0]
    for counts in ([4, 3], [6, 1], [7, 0], [0, 7], [0, 5, 2]):
        results = ranks.run(train, nproc=len(counts), args=(kind, counts, microbatch_size))
        assert_ranks_agree(results)
        assert apart(one.losses, results[0].losses) <= 1e-12
        assert tensors_apart(one.tensors, results[0].tensors) <= 1e-12
        assert all(trained.extra == 7 * NUM_STEPS for trained in results)


def train_with_dropout(world: Any, counts: list[int]) -> Trained:
    start = sum(counts[: world.rank])
    return take_steps(
        build(2, dropout=0.3),
        [samples(step)[start : start + counts[world.rank]] for step in range(NUM_STEPS)],
    )


def test_microbatches_are_numbered_through_over_the_ranks(ranks: Pool) -> None:
    """Cut alike, so dropout is the same too."""
    one = ranks.run(train_with_dropout, nproc=1, args=([7],))[0]
    for counts in ([4, 3], [2, 5], [2, 2, 3], [0, 6, 1]):
        results = ranks.run(train_with_dropout, nproc=len(counts), args=(counts,))
        assert_ranks_agree(results)
        assert apart(one.losses, results[0].losses) <= 1e-12
        assert tensors_apart(one.tensors, results[0].tensors) <= 1e-12


def _all_ranks(world: Any) -> Axis:
    return Axis("dp", world.world_size, world.rank, dist.group.WORLD)


def number_samples(world: Any, counts: list[int]) -> Any:
    share = RawBatches(_all_ranks(world), world.device).share(torch.ones(counts[world.rank], 2), 2)
    return [
        (len(batch), list(numbers))
        for (_, batch), numbers in zip(share.microbatches, share.samples, strict=True)
    ]


def test_samples_are_numbered_through_over_the_ranks(ranks: Pool) -> None:
    first, second, third = ranks.run(number_samples, nproc=3, args=([3, 0, 2],))
    assert first == [(2, [0, 1]), (1, [2])]
    assert second == []
    assert third == [(2, [3, 4])]


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_no_samples_at_all_skip_the_step(ranks: Pool, nproc: int, dtype: str) -> None:
    for skipped, changed in ranks.run(step_on_nothing, nproc=nproc, args=(dtype,)):
        assert skipped == [
            "the global batch has a total weight of 0",
            None,
            "the global batch has a total weight of 0",
        ]
        assert changed == [False, True, False]


def step_on_nothing(world: Any, dtype: str) -> Any:
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(5, 2),
        loss=lambda output, batch: (output.float().square().sum() * 0.01, len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        dtype=dtype,
    )
    skipped, changed = [], []
    for count in (0, 3, 0):
        before = trainer.model.weight.detach().clone()
        skipped.append(trainer.step(torch.ones(count, 5)).skipped)
        changed.append(not torch.equal(trainer.model.weight, before))
    return skipped, changed
