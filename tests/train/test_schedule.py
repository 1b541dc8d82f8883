"""Learning rates by step: warm-up, what follows it, and the linear scaling rule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import PacelineError
from paceline.recipe.load import parse_recipe
from paceline.recipe.schema import AdamW, Sgd
from paceline.train.schedule import build_schedule, scale_lr
from paceline.train.tasks import build_lr_schedule, build_optimizer
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import digits_recipe


def factors(num_steps: int, **fields: Any) -> list[float]:
    factor = build_schedule(AdamW(kind="adamw", **fields), num_steps)
    return [factor(step) for step in range(num_steps + 3)]


def test_warm_up_rises_to_the_peak_in_so_many_steps() -> None:
    for kind in ("constant", "linear", "cosine"):
        rising = factors(20, schedule=kind, warmup_steps=4)[:5]
        assert rising == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=0.01 if kind != "constant" else 0)
        assert rising[3] == 1.0


def test_constant_stays() -> None:
    assert factors(10, schedule="constant", warmup_steps=2)[2:] == [1.0] * 11


def test_linear_reaches_the_floor_at_the_last_step_and_stays() -> None:
    falling = factors(11, schedule="linear", min_lr_ratio=0.2)
    assert falling[:11] == pytest.approx([1 - 0.08 * step for step in range(11)])
    assert falling[10:] == pytest.approx([0.2] * 4)


def test_cosine_is_half_a_cosine() -> None:
    falling = factors(12, schedule="cosine", warmup_steps=3, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert falling[3:12] == pytest.approx(expected)
    assert falling[11:] == pytest.approx([0.1] * 4)
    assert sorted(falling[3:12], reverse=True) == falling[3:12]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_short_runs_have_a_rate(kind: str, num_steps: int, warmup: int) -> None:
    found = factors(num_steps, schedule=kind, warmup_steps=warmup, min_lr_ratio=0.1)[:num_steps]
    assert all(0 < factor <= 1 for factor in found)


def test_the_linear_scaling_rule_follows_the_global_batch() -> None:
    plain = Sgd(kind="sgd", lr=0.1)
    scaled = Sgd(kind="sgd", lr=0.1, lr_scaling="linear", base_batch_size=256)
    assert scale_lr(plain, plain.lr, 1024) == 0.1
    assert [scale_lr(scaled, scaled.lr, size) for size in (128, 256, 1024)] == pytest.approx([0.05, 0.1, 0.4])


def test_recipes_build_optimizer_and_schedule_by_it() -> None:
    table = digits_recipe()
    table["optimizer"] |= {
        "lr_scaling": "linear",
        "base_batch_size": 50,
        "schedule": "linear",
        "warmup_steps": 2,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.3,
        "nesterov": True,
    }
    recipe = parse_recipe(table)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].requires_grad_(False)
    model.append(nn.Linear(3, 2))
    optimizer = build_optimizer(recipe, list(model.named_parameters()))
    assert isinstance(optimizer, torch.optim.SGD)
    matrices, others = optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert [tuple(p.shape) for p in matrices["params"]] == [(2, 3)]
    assert [tuple(p.shape) for p in others["params"]] == [(3,), (3,), (2,)]
    assert all(group["nesterov"] for group in optimizer.param_groups)
    schedule = build_lr_schedule(recipe, optimizer, 5)
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates == [pytest.approx([rate] * 2) for rate in (0.1, 0.2, 0.2, 0.1, 0.0)]


def test_adamw_takes_the_recipes_settings() -> None:
    table = digits_recipe() | {
        "optimizer": {"kind": "adamw", "lr": 0.5, "betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 0.2}
    }
    optimizer = build_optimizer(parse_recipe(table), list(nn.LayerNorm(3).named_parameters()))
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.7, 0.8), 1e-3, 0.0)


def rates(world: Any) -> list[float]:
    trainer = Trainer(
        nn.Linear(3, 1),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=2.0),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, build_schedule(AdamW(kind="adamw", schedule="linear", warmup_steps=2), 5)
        ),
    )
    return [trainer.step(torch.randn(2, 3)).lr for _ in range(5)]


def test_a_steps_rate_is_the_one_that_it_used(ranks: Pool) -> None:
    for found in ranks.run(rates):
        assert found == pytest.approx([1.0, 2.0, 2.0, 1.1, 0.2])


def test_python_reaches_the_schedules_of_recipes() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=3.0)
    built = paceline.schedule("cosine", num_steps=9, warmup_steps=3, min_lr_ratio=0.2, lr_scale=0.5)(
        optimizer
    )
    found = []
    for _ in range(11):
        found.append(built.get_last_lr()[0])
        optimizer.step()
        built.step()
    expected = factors(9, schedule="cosine", warmup_steps=3, min_lr_ratio=0.2)
    assert found == pytest.approx([1.5 * factor for factor in expected[:11]])
    for wrong in ({"num_steps": 0}, {"num_steps": 5, "min_lr_ratio": 2.0}, {"num_steps": 5, "kind": "poly"}):
        with pytest.raises(PacelineError):
            paceline.schedule(**wrong)  # type: ignore[arg-type]


def resume(world: Any, folder: str) -> tuple[str, list[float]]:
    def start(num_steps: int, *accept: str) -> list[float]:
        trainer = Trainer(
            nn.Linear(3, 1),
            loss=lambda output, batch: (output.sum(), len(output)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
            schedule=paceline.schedule("linear", num_steps=num_steps, min_lr_ratio=0.0),
        )
        trainer.resume(folder, accept=accept)
        found = [trainer.step(torch.randn(2, 3)).lr for _ in range(2)]
        trainer.save(wait=True)
        return found

    start(5)
    with pytest.raises(PacelineError) as caught:
        start(9)
    return str(caught.value), start(5) + start(9, "schedule.num_steps")


def test_a_run_is_not_resumed_under_another_length_of_its_schedule(ranks: Pool, tmp_path: Path) -> None:
    [[refused, rates]] = ranks.run(resume, nproc=1, args=(str(tmp_path),))
    assert "schedule.num_steps was 5 and is 9" in refused
    assert rates == pytest.approx([0.5, 0.25, 0.5, 0.375])


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_exact_kernels_round_an_element_alike_wherever_a_tensor_is_cut(kind: str, reduction: str) -> None:
    """Shards end elsewhere than whole tensors: here after 33 of 259 numbers, or rows of 96, or of 7."""
    table = digits_recipe() | {"optimizer": {"kind": kind, "lr": 0.1}}
    table["train"] |= {"reduction": reduction}
    recipe = parse_recipe(table)
    generator = torch.Generator().manual_seed(0)
    shapes = [(259,), (259, 96), (259, 7)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(s, generator=generator) * 1e-2 for s in shapes] for _ in range(20)]

    def train(part: slice) -> list[torch.Tensor]:
        parameters = [nn.Parameter(value[part].clone()) for value in values]
        optimizer = build_optimizer(recipe, [(str(number), p) for number, p in enumerate(parameters)])
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient[part].clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    whole = train(slice(None))
    parts = [train(slice(start, start + 33)) for start in range(0, 259, 33)]
    same = [torch.equal(w, torch.cat(p)) for w, p in zip(whole, zip(*parts, strict=True), strict=True)]
    if reduction == "exact":
        assert same == [True, True, True]
    else:
        assert same[1:] == [True, False], "the fused kernels could serve the exact reduction too"
