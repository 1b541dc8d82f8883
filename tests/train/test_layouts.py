"""Every layout trains as one process does: the same losses, norms and weights after each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool

STEPS = 3
# Microbatches of 2: six per step, so that ranks own different numbers of them.
GLOBAL_BATCH = 12


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token ids."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"ids": torch.randint(0, 64, (9,), generator=generator)}


def build_gpt() -> nn.Module:
    section = GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=4, dropout=0.2)
    return Gpt(section, 64, 8)


def next_token_loss(logits: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["ids"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return losses, torch.tensor(float(targets.numel()))


def build_trainer(layout: str, **settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        settings.pop("model", build_gpt),
        forward=lambda model, batch: model(batch["ids"][:, :-1]),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
        clip_norm=0.5,
        **{"dtype": "fp64", "reduction": "fast", **settings},
    )


def train(world: Any, layout: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = build_trainer(layout, **(settings or {}))
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    found: dict[str, Any] = {"start": trainer.whole_state(), "losses": [], "norms": []}
    for share in loader:
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        if step.number == STEPS:
            break
    found["end"] = trainer.whole_state()
    found["valid"] = trainer.evaluate(trainer.loader(Tokens(), global_batch_size=10, shuffle=False)).loss
    trainer.close()
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


LAYOUTS = {
    2: [
        "dp_replicate=2",
        "dp_shard=2 zero=1",
        "dp_shard=2 zero=2",
        "dp_shard=2",
        "tp=2",
        "tp=2 sequence=true",
        "cp=2 cp_by=gather",
    ],
    4: [
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2",
        "dp_replicate=2 tp=2",
        "tp=4",
        "dp_shard=4",
        "dp_shard=2 tp=2 sequence=true",
        "cp=2 tp=2",
    ],
    8: ["dp_replicate=2 dp_shard=2 tp=2"],
}


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(n, layout) for n, layouts in LAYOUTS.items() for layout in layouts]
)
def test_trains_as_one_process(ranks: Pool, num_ranks: int, layout: str) -> None:
    (one,) = ranks.run(train, nproc=1, args=("",))
    many = ranks.run(train, nproc=num_ranks, args=(layout,))
    for other in many:
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-11)
        assert other["valid"] == pytest.approx(one["valid"], rel=1e-12)
    assert distance(one["start"], many[0]["start"]) == 0
    assert distance(one["end"], many[0]["end"]) < 1e-9


def build_with(world: Any, layout: str, optimizer: str, reduction: str = "exact", **settings: bool) -> str:
    try:
        paceline.Trainer(
            build_gpt,
            loss=next_token_loss,
            forward=lambda model, batch: model(batch["ids"][:, :-1]),
            optimizer=lambda named: getattr(torch.optim, optimizer)([p for _, p in named], **settings),
            layout=layout,
            reduction=reduction,
            example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        )
    except paceline.PacelineError as error:
        return error.code
    return "built"


@pytest.mark.parametrize(
    ("layout", "reduction", "expected"),
    [
        ("dp_shard=2", "exact", "PL448"),
        ("dp_shard=2", "fast", "built"),
        ("dp_replicate=2", "exact", "built"),
        ("tp=2", "exact", "built"),
    ],
)
def test_fused_kernels_that_round_by_place(ranks: Pool, layout: str, reduction: str, expected: str) -> None:
    assert ranks.run(build_fused, args=(layout, reduction)) == [expected] * 2


def build_fused(world: Any, layout: str, reduction: str) -> str:
    return build_with(world, layout, "AdamW", reduction, fused=True)
