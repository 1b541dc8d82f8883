"""The global norm of every layout against that of the whole gradients, and what clipping makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from tests.dist.pool import Pool
from tests.train.test_layouts import GLOBAL_BATCH, Tokens, build_gpt, next_token_loss

LAYOUTS = {
    1: [""],
    2: ["dp_replicate=2", "dp_shard=2", "dp_shard=2 zero=1", "tp=2"],
    4: ["dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "tp=4", "dp_shard=4"],
}


def measure(world: Any, layouts: list[str], reduction: str) -> list[dict[str, Any]]:
    return [_measure(layout, reduction) for layout in layouts]


def _measure(layout: str, reduction: str) -> dict[str, Any]:
    found: dict[str, Any] = {"layout": layout}
    for watched in (True, False):
        trainer = paceline.Trainer(
            build_gpt,
            forward=lambda model, batch: model(batch["ids"][:, :-1]),
            loss=next_token_loss,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
            layout=layout,
            example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
            microbatch_size=2,
            clip_norm=0.25,
            dtype="fp64",
            reduction=reduction,
        )
        wholes: list[Tensor] = []

        def look(gradients: dict[str, Tensor], trainer: Any = trainer, wholes: list[Tensor] = wholes) -> None:
            wholes.extend(trainer.whole(name, gradient).clone() for name, gradient in gradients.items())

        if watched:
            trainer.on_gradients(look)
        before = trainer.whole_state()
        share = next(iter(trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)))
        norm = trainer.step(share).grad_norm
        after = trainer.whole_state()
        moved = math.sqrt(sum(float((after[k] - before[k]).square().sum()) for k in named(trainer, after)))
        if watched:
            found["norm"] = norm
            found["expected"] = float(torch.linalg.norm(torch.cat([w.reshape(-1) for w in wholes])))
            found["num_tensors"] = len(wholes)
            found["moved_watched"] = moved
        else:
            assert norm == found["norm"]
            found["moved"] = moved
        trainer.close()
    return found


def named(trainer: Any, state: dict[str, Tensor]) -> list[str]:
    return [name for name, _ in trainer.model.named_parameters() if name in state]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_norm_is_that_of_the_whole_gradients(ranks: Pool, reduction: str) -> None:
    norms = set()
    for nproc, layouts in LAYOUTS.items():
        results = ranks.run(measure, nproc, (layouts, reduction), timeout_s=60)
        for rank, of_rank in enumerate(results):
            for found in of_rank:
                assert found["norm"] == pytest.approx(found["expected"], rel=1e-13), found
                assert found["num_tensors"] == results[0][0]["num_tensors"]
                assert found["norm"] > 0.25, "clipping should clip"
                if rank == 0:
                    assert found["moved"] == pytest.approx(0.25, rel=1e-5), found
                    assert found["moved_watched"] == pytest.approx(0.25, rel=1e-5), found
                if "tp" not in found["layout"]:
                    norms.add(found["norm"])
    assert max(norms) == pytest.approx(min(norms), rel=1e-12)
    if reduction == "exact":
        assert len(norms) == 1
