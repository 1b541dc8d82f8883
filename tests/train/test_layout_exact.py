"""The exact reduction: the same bits on any number of ranks of dp_replicate and dp_shard, at a fixed tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint import hash_tensors
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.train.test_layouts import next_token_loss

STEPS = 4
# Microbatches of 2, the last one of 1: seven per step, so that ranks own different numbers of them.
GLOBAL_BATCH = 13


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token ids below `num_ids`."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"ids": torch.randint(0, self.num_ids, (9,), generator=generator)}


def train(world: Any, layouts: list[str], num_ids: int) -> list[dict[str, Any]]:
    return [train_in(layout, num_ids) for layout in layouts]


def train_in(layout: str, num_ids: int) -> dict[str, Any]:
    def build() -> nn.Module:
        section = GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=2, dropout=0.2)
        return Gpt(section, num_ids, 8)

    trainer = paceline.Trainer(
        build,
        forward=lambda model, batch: model(batch["ids"][:, :-1]),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
        clip_norm=0.5,
        reduction="exact",
    )
    found: dict[str, Any] = {"layout": layout, "losses": [], "norms": []}
    for share in trainer.loader(Tokens(num_ids), global_batch_size=GLOBAL_BATCH):
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        if step.number == STEPS:
            break
    weights = trainer.whole_state()
    moments = trainer._updates["model"].optimizer_state()["parameters"]
    found["weights"] = hash_tensors(weights) if weights else ""
    found["moments"] = hash_tensors(
        {f"{name}.{key}": value for name, each in moments.items() for key, value in each["state"].items()}
    )
    trainer.close()
    return found


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("losses", "norms", "moments", "weights"):
        assert other[key] == one[key], (other["layout"], key, other[key], one[key])


@pytest.mark.parametrize("num_ids", [61, 13])  # of 13 rows the last of four ranks has one
def test_bits_do_not_depend_on_dp(ranks: Pool, num_ids: int) -> None:
    ((one,),) = ranks.run(train, 1, ([""], num_ids))
    assert all(norm > 0.5 for norm in one["norms"]), "clipping should clip"
    four = ["dp_replicate=4", "dp_shard=4", "dp_replicate=2 dp_shard=2"]
    four += ["dp_shard=4 zero=1", "dp_shard=4 zero=2"] if num_ids == 61 else []
    for nproc, layouts in {4: four, 2: ["dp_shard=2"]}.items():
        for other in ranks.run(train, nproc, (layouts, num_ids), timeout_s=120)[0]:
            assert_same_bits(one, other)


def test_bits_do_not_depend_on_dp_beside_tp(ranks: Pool) -> None:
    ((one,), _) = ranks.run(train, 2, (["tp=2"], 64))
    others = ranks.run(train, 4, (["dp_replicate=2 tp=2", "dp_shard=2 tp=2"], 64), timeout_s=120)
    for other in others[0]:
        assert_same_bits(one, other)
