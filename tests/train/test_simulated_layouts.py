"""Steps of every layout on a simulated GPU: no devices are mixed, and the host waits once per step.

Nor does a stream use memory that another one may still write or read. Backward and its hooks are torch's own:
DDP's buckets, FSDP's gathers, stages. Under `ep`, the rows that ranks exchange follow from numbers, of which
this GPU has ones: every expert gets one row.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import paceline
from paceline.models import moe
from paceline.models.gpt import Gpt
from paceline.models.moe import MoeGpt
from paceline.parallel.experts import forms
from paceline.parallel.experts import shared as expert_layout
from paceline.recipe.schema import GptModel, MoeModel
from tests.dist.simulated_gpu import simulated_gpu

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:Please use the new API")

THE_WAIT = {"train/agreement.py:wait": 1}
# FSDP copies a gradient to the CPU at once if others follow, or if a hook reads it there.
OFFLOADING = {"torch_seams/fsdp.py:run"}
FAST: dict[str, Any] = {"reduction": "fast"}
FP16: dict[str, Any] = {"reduction": "fast", "dtype": "fp16"}
INT8: dict[str, Any] = {"compress": {"kind": "int8"}}

QUICK = [
    ("dp_replicate=2", {}),
    ("dp_replicate=2", FP16),
    ("dp_shard=2", {}),
    ("pp=2 dp_shard=2 zero=2", FAST),
    ("cp=2 tp=2", FAST),
]
SLOW = [
    ("dp_replicate=2", FAST),
    ("dp_replicate=2", INT8),
    ("dp_shard=2 zero=1", {}),
    ("dp_shard=2 zero=2", FP16),
    ("dp_shard=2", FAST),
    ("dp_shard=2 offload=cpu", {}),
    ("dp_shard=2 offload=cpu", FP16),
    ("dp_replicate=2 dp_shard=2", {}),
    ("dp_replicate=2 dp_shard=2 zero=2", FAST),
    ("tp=2", {}),
    ("tp=2 sequence=true", FAST),
    ("tp=2 dp_shard=2 recompute=block", {}),
    ("tp=2 dp_replicate=2 recompute=selective", FAST),
    ("cp=2 cp_by=gather", {}),
    ("cp=2 cp_by=heads dp_replicate=2", FAST),
    ("cp=2 dp_shard=2", {}),
    ("pp=2", FP16),
    ("pp=2 schedule=zbv", {}),
    ("pp=2 dp_replicate=2", {}),
    ("pp=2 dp_shard=2", {}),
    ("pp=2 tp=2", {}),
    ("pp=2 cp=2", FAST),
    ("pp=2 tp=2 dp_shard=2", FAST),
]


EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("dp_replicate=2 ep=2", {}),
    ("dp_shard=2 ep=2 zero=2", FAST),
    ("tp=2 dp_replicate=2 ep=2", FAST),
    ("cp=2 ep=2", FAST),
]


def token_losses(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    return functional.cross_entropy(output.flatten(0, 1).float(), targets, reduction="sum"), len(targets)


def list_waits(
    layout: str, rank: int, num_ranks: int, settings: dict[str, Any], mixture: dict[str, Any] | None = None
) -> list[Counter[str]]:
    """Return the places at which each step of a small GPT waits, with their counts."""
    found, size, length = [], 2, 8
    model: torch.nn.Module
    if mixture is not None:
        size, length, section = 1, 2, MoeModel(kind="moe", hidden=16, heads=4, experts=2, experts_per_token=1)
        model = MoeGpt(section.model_copy(update={"layers": 1, **mixture}), 32, 8)
    else:
        model = Gpt(GptModel(kind="gpt", layers=4 if "pp" in layout else 1, hidden=16, heads=4), 32, 8)
    with simulated_gpu(num_ranks, rank) as waits, ExitStack() as stack:
        for module in (expert_layout, forms, moe):  # they take a simulated tensor for one of a trial forward
            stack.enter_context(mock.patch.object(module, "is_fake", waits.is_trial))
        trainer = paceline.Trainer(
            model,
            forward=lambda model, batch: getattr(found := model(batch["ids"]), "logits", found),
            loss=token_losses,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
            layout=layout,
            microbatch_size=size,
            clip_norm=1.0,
            example={"ids": torch.zeros(size, length, dtype=torch.int64)},
            **settings,
        )
        sample = dict.fromkeys(("ids", "targets"), torch.zeros(length, dtype=torch.int64))
        for share in trainer.loader([sample] * 18 * size, global_batch_size=6 * size, pin_memory=False):
            waits.places.clear()
            step = trainer.step(share)
            assert step.skipped is None
            assert step.grad_norm >= 0
            found.append(Counter(waits.places))
        trainer.close()
        assert not waits.streams.races, Counter(waits.streams.races)
    return found


@pytest.mark.parametrize(
    ("layout", "settings"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())) or "exact",
)
def test_a_step_of_a_layout_waits_for_the_device_once(layout: str, settings: dict[str, Any]) -> None:
    num_ranks = paceline.recipe.layout.Layout.parse(layout).fewest_ranks
    for rank in (0, num_ranks - 1) if "pp" in layout else (num_ranks - 1,):
        _, _, last = list_waits(
            layout, rank, num_ranks, settings
        )  # the first two count operations, and learn forms
        for place in OFFLOADING if "offload" in layout else ():
            del last[place]
        assert last == THE_WAIT, rank


@pytest.mark.parametrize(
    ("layout", "settings"),
    [EXPERTS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in EXPERTS[1:])],
)
def test_a_step_with_experts_waits_for_their_rows_besides(layout: str, settings: dict[str, Any]) -> None:
    """The host has to know how many rows ranks exchange: at most 4 waits per mixture and microbatch."""
    num_ranks = paceline.recipe.layout.Layout.parse(layout).fewest_ranks
    *_, last = list_waits(layout, num_ranks - 1, num_ranks, settings, {})
    others = {place: count for place, count in last.items() if place not in THE_WAIT}
    assert last - Counter(others) == THE_WAIT
    assert {place.partition(":")[0] for place in others} == {"parallel/experts/shared.py"}
    assert sum(others.values()) <= 4 * (6 if "cp" in layout else 3)


@pytest.mark.parametrize("layout", ["dp_replicate=2", pytest.param("dp_shard=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mixture", [{"balance": "bias"}, {"balance": "global"}])
def test_experts_on_every_rank_wait_for_their_rows_once(layout: str, mixture: dict[str, Any]) -> None:
    """The host has to know how many rows each expert has, once per mixture and microbatch."""
    *_, last = list_waits(layout, 1, 2, {}, mixture)
    assert last == THE_WAIT | {"models/moe.py:forward": 3}


def test_a_gpu_never_takes_a_parameter_beside_the_cpu() -> None:
    """The simulation sees what it is for."""
    with simulated_gpu():
        here, there = torch.zeros(2), torch.zeros(2, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([here, there])
        leaf = torch.zeros(2, device="cuda", requires_grad=True)
        (leaf * 2).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.device.type == "cuda"
