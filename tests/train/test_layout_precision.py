"""fp16, bf16 and what is not finite, under layouts: all ranks do as one process does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from tests.dist.pool import Pool

STEPS = 4
GLOBAL_BATCH = 12
LAST_ID = 63
FINE, BAD_GRADIENT, BAD_LOSS = 0, 1, 2


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token ids; sample `bad` ends in the last id and is marked."""

    def __init__(self, bad: int, kind: int) -> None:
        self.bad, self.kind = bad, kind

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        ids = torch.randint(0, LAST_ID, (9,), generator=generator)
        if place == self.bad:
            ids[4] = LAST_ID
        return {"ids": ids, "kind": torch.tensor(self.kind if place == self.bad else FINE)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A model in which a marked sample makes the gradient of the last id's row of the embedding infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
        x = self.embed(ids)
        is_bad = (ids == LAST_ID) & (kind == BAD_GRADIENT).unsqueeze(1)
        if x.requires_grad:
            x.register_hook(lambda grad: grad.masked_fill(is_bad.unsqueeze(2), math.inf))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["ids"][:, 1:].flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    if (batch["kind"] == BAD_LOSS).any():
        losses = losses * math.nan
    return losses, torch.tensor(float(targets.numel()))


def train(world: Any, layouts: list[str], dtype: str, bad: int, kind: int) -> dict[str, dict[str, Any]]:
    return {layout: train_in(layout, dtype, bad, kind) for layout in layouts}


def train_in(layout: str, dtype: str, bad: int, kind: int) -> dict[str, Any]:
    trainer = paceline.Trainer(
        Model,
        forward=lambda model, batch: model(batch["ids"][:, :-1], batch["kind"]),
        loss=loss_of,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64), "kind": torch.zeros(2, dtype=torch.int64)},
        microbatch_size=2,
        clip_norm=0.5,
        dtype=dtype,
        reduction="fast",
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": []}
    scaler = trainer._updates["model"]._scaler
    loader = trainer.loader(Samples(bad, kind), global_batch_size=GLOBAL_BATCH, shuffle=False)
    for share in loader:
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        found["skipped"].append(step.skipped)
        found["scales"].append(None if scaler is None else scaler.scale_of_gradients())
        if step.number == STEPS:
            break
    found["finite"] = all(bool(t.isfinite().all()) for t in trainer.whole_state().values())
    trainer.close()
    return found


LAYOUTS = {2: ["dp_replicate=2", "dp_shard=2", "dp_shard=2 zero=1", "tp=2"], 4: ["dp_shard=2 tp=2"]}


def compare(ranks: Pool, dtype: str, bad: int, kind: int, rel: float) -> dict[str, Any]:
    """Compare all ranks of all layouts with one process, and return its result."""
    (one,) = ranks.run(train, 1, ([""], dtype, bad, kind))
    expected: dict[str, Any] = one[""]
    for nproc, layouts in LAYOUTS.items():
        for of_rank in ranks.run(train, nproc, (layouts, dtype, bad, kind), timeout_s=60):
            for layout, found in of_rank.items():
                assert found["skipped"] == expected["skipped"], layout
                assert found["scales"] == expected["scales"], layout
                assert found["losses"] == pytest.approx(expected["losses"], rel=rel, nan_ok=True), layout
                assert found["norms"] == pytest.approx(expected["norms"], rel=5 * rel, nan_ok=True), layout
                assert found["finite"], layout
    return expected


@pytest.mark.parametrize("bad", [GLOBAL_BATCH + 1, 2 * GLOBAL_BATCH - 1])  # of the first rank, of the last
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Pool, bad: int) -> None:
    found = compare(ranks, "fp16", bad, BAD_GRADIENT, 0.02)
    assert found["skipped"] == [None, "the gradient of embed.weight is not finite", None, None]
    first, second, third, fourth = found["scales"]
    assert second == 2 * first  # the inverse of the scale
    assert second == third == fourth
    assert not math.isfinite(found["norms"][1])


def test_a_loss_that_is_no_number_is_skipped_by_all(ranks: Pool) -> None:
    found = compare(ranks, "fp32", 2 * GLOBAL_BATCH - 1, BAD_LOSS, 1e-4)
    assert found["skipped"] == [
        None,
        "the loss of microbatch 5 of 6 is nan while others are finite",
        None,
        None,
    ]


def test_bf16_is_near_one_process(ranks: Pool) -> None:
    found = compare(ranks, "bf16", 0, FINE, 0.02)
    assert found["skipped"] == [None] * STEPS
