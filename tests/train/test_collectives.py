"""The messages of a step: one round of gradients, one small packed vector, nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.parallel.replicate import Replica
from paceline.train.agreement import NUM_SENT, Agreement
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.dist.recorder import RECORD, count_recorded, recorded_collectives

NUM_PARAMETERS = 12 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3
PER_MICROBATCH, PER_BATCHNORM = 2, 2 * 64 + 1


def build_trainer(model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return Trainer(
        model,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
        microbatch_size=2,
        **{"reduction": "fast", **settings},
    )


def agreement_of(nproc: int, numbers: int) -> Any:
    """Return the collective of an agreement: as long as a power of two, from 256."""
    return "all_reduce", (max(256, 1 << math.ceil(math.log2(nproc * NUM_SENT + numbers))),)


def data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 12, generator=torch.Generator().manual_seed(0)))


def collectives_of_a_step(
    world: Any, global_batch_size: int, num_steps: int, settings: dict[str, Any]
) -> Any:
    """Return the collectives per step, without the first step, in which DDP agrees on its buckets."""
    trainer = build_trainer(**settings)
    steps = []
    for number, share in enumerate(
        trainer.loader(data(global_batch_size * num_steps), global_batch_size=global_batch_size)
    ):
        before = count_recorded()
        trainer.step(share)
        if number >= 1:
            steps.append(recorded_collectives(before))
    return steps


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_a_step_is_one_agreement_and_one_round_of_gradients(
    ranks: Pool, nproc: int, num_microbatches: int
) -> None:
    settings = {"ddp": {"bucket_cap_mb": 0.01}, "clip_norm": 0.1}
    args = (2 * num_microbatches, 5, settings)
    results = ranks.run(collectives_of_a_step, nproc=nproc, args=args, env=RECORD)
    for steps in results:
        assert len(steps) == 4
        for *first, agreement, last in steps:
            gradients = [*first, last]
            assert agreement == agreement_of(nproc, PER_MICROBATCH * num_microbatches)
            assert len(gradients) > 1, "several buckets"
            assert {name for name, _ in gradients} == {"all_reduce"}
            assert sum(size for _, (size,) in gradients) == NUM_PARAMETERS
    assert all(steps == results[0] for steps in results)


def test_an_exact_reduction_has_no_collective_beside_the_agreement(ranks: Pool) -> None:
    """Gradients travel in messages between pairs, which torch does not record."""
    settings = {"reduction": "exact", "ddp": {"bucket_cap_mb": 0.01}}
    for steps in ranks.run(collectives_of_a_step, nproc=3, args=(8, 5, settings), env=RECORD):
        assert len(steps) == 4
        for collectives in steps:
            assert collectives == [agreement_of(3, 4 * PER_MICROBATCH)]


def batchnorm_steps(world: Any, settings: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    return collectives_of_a_step(world, 8, 4, {"model": model, **settings})


def test_running_statistics_travel_in_the_same_vector(ranks: Pool) -> None:
    for steps in ranks.run(batchnorm_steps, args=({},), env=RECORD):
        for agreement, *gradients in steps:
            assert agreement == agreement_of(2, 4 * (PER_MICROBATCH + PER_BATCHNORM))
            assert [name for name, _ in gradients] == ["all_reduce"]


def test_finding_unused_parameters_costs_a_map_of_them(ranks: Pool) -> None:
    settings, num_tensors = {"ddp": {"find_unused_parameters": True}}, 6
    for steps in ranks.run(collectives_of_a_step, args=(8, 4, settings), env=RECORD):
        for *of_ddp, agreement in steps:
            assert sorted(of_ddp) == [("all_reduce", (num_tensors,)), ("all_reduce", (NUM_PARAMETERS,))]
            assert agreement == agreement_of(2, 4 * PER_MICROBATCH + num_tensors)


def other_collectives(world: Any) -> dict[str, Any]:
    trainer = build_trainer()
    loader, result = trainer.loader(data(30), global_batch_size=10, shuffle=False), {}
    torch.manual_seed(world.rank)

    def record(name: str, do: Any) -> None:
        before = count_recorded()
        do()
        result[name] = [kind for kind, _ in recorded_collectives(before)]

    record("first evaluation", lambda: trainer.evaluate(loader))
    record("evaluate", lambda: trainer.evaluate(loader))
    for _ in range(2):
        trainer.step((torch.randn(3, 12),))
    record("raw batch", lambda: trainer.step((torch.randn(3, 12),)))
    record("loader", lambda: trainer.loader(data(4), global_batch_size=2))
    return result


def test_evaluation_is_two_collectives_and_a_raw_batch_costs_one_more(ranks: Pool) -> None:
    for result in ranks.run(other_collectives, env=RECORD):
        assert result["first evaluation"] == ["all_gather", "all_gather", "all_reduce", "all_reduce"], (
            "settings, whether to stop, and results"
        )
        assert result["evaluate"] == ["all_reduce", "all_reduce"], "whether to stop, and results"
        assert result["raw batch"] == ["all_reduce"] * 3, "sizes, agreement and gradients"
        assert result["loader"] == []


def one_rank(world: Any) -> list[Any]:
    before = count_recorded()
    trainer = build_trainer()
    for share in trainer.loader(data(8), global_batch_size=4):
        trainer.step(share)
    return recorded_collectives(before)


def test_one_rank_talks_to_nobody(ranks: Pool) -> None:
    assert ranks.run(one_rank, nproc=1, env=RECORD) == [[]]


def before_the_last_backward(world: Any) -> list[str]:
    """The order of events within a step: the agreement travels while the last gradients are computed."""
    events: list[str] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("backward")
            return grad

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Watch.apply(super().forward(x))

    trainer = build_trainer(Model(12, 3))
    launch, reduce = Agreement.launch, Replica._reduce_bucket

    def noted(event: str, do: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return do(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "launch", noted("agreement", launch))
        patch.setattr(Replica, "_reduce_bucket", noted("gradients", reduce))
        for share in trainer.loader(data(8), global_batch_size=8):
            trainer.step(share)
    return events


def test_the_agreement_travels_while_gradients_are_computed(ranks: Pool) -> None:
    for events in ranks.run(before_the_last_backward):
        assert events == ["forward", "backward", "forward", "backward", "gradients", "agreement"]


def collectives_of_a_start(world: Any, reduction: str) -> tuple[int, int, bool]:
    """Return bytes broadcast and numbers summed while a trainer is built, and whether ranks agree."""
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(world.rank)
    before = count_recorded()
    build_trainer(model, reduction=reduction)
    found = recorded_collectives(before)
    broadcast = [sizes[0] for name, sizes in found if name == "broadcast" and sizes[0] > 64]
    summed = sum(sizes[0] for name, sizes in found if name == "all_reduce" and len(sizes) == 1)
    return sum(broadcast), summed, all((p == 0).all().item() for p in model.parameters())


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_the_model_is_sent_once_when_training_starts(ranks: Pool, reduction: str) -> None:
    num_parameters = 12 * 64 + 64 + 2 * 64 + 64 * 3 + 3
    model_bytes = 4 * (num_parameters + 2 * 64)  # and running statistics
    for broadcast, summed, is_same in ranks.run(collectives_of_a_start, args=(reduction,), env=RECORD):
        assert is_same
        assert broadcast == model_bytes
        assert summed < num_parameters
