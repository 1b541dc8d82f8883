"""recompute: the same numbers under every layout, less memory, and running statistics that move once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.models.gpt import Gpt
from paceline.models.resnet import Resnet
from paceline.recipe.schema import GptModel, ResnetModel
from tests.dist.pool import Pool, RankError
from tests.train.test_layout_checkpoints import Tracker
from tests.train.test_layouts import STEPS, Tokens, distance, next_token_loss, train

LAYOUTS = {1: [""], 2: ["dp_replicate=2", "dp_shard=2", "tp=2"], 4: ["dp_shard=2 tp=2"]}


def train_all(world: Any, layouts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    return [(layout, train(world, layout)) for layout in layouts]


def test_numbers_stay(ranks: Pool) -> None:
    (one,) = ranks.run(train, 1, ("",))
    for nproc, layouts in LAYOUTS.items():
        words = [f"{layout} recompute={kind}" for layout in layouts for kind in ("block", "selective")]
        for layout, found in ranks.run(train_all, nproc, (words,), timeout_s=90)[0]:
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-12), layout
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-11), layout
            assert distance(one["start"], found["start"]) == 0, layout
            assert distance(one["end"], found["end"]) < 1e-9, layout


def build_deep() -> nn.Module:
    section = GptModel(kind="gpt", layers=6, hidden=32, heads=4, kv_heads=4, dropout=0.2)
    return Gpt(section, 64, 8)


def measure_activations(world: Any, layouts: list[str]) -> list[int]:
    """Return bytes that live when forward is done and backward begins, which were not there before."""
    return [_measure_activations(layout) for layout in layouts]


def _measure_activations(layout: str) -> int:
    trackers: list[Tracker] = []
    found: list[int] = []

    def loss(logits: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        pair = next_token_loss(logits, batch)
        if trackers:
            found.append(trackers[0].live_bytes)
        return pair

    trainer = paceline.Trainer(
        build_deep,
        forward=lambda model, batch: model(batch["ids"][:, :-1]),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=4,
        reduction="fast",
    )
    shares = iter(trainer.loader(Tokens(), global_batch_size=8))
    trainer.step(next(shares))  # counts operations, and makes what stays
    trackers.append(Tracker())
    with trackers[0]:
        trainer.step(next(shares))
    trainer.close()
    return found[0]


def test_memory_falls(ranks: Pool) -> None:
    for nproc, layout in {1: "", 2: "tp=2"}.items():
        words = [f"{layout} recompute={kind}" for kind in ("none", "selective", "block")]
        none, selective, block = ranks.run(measure_activations, nproc, (words,), timeout_s=60)[0]
        assert block < 0.4 * none, (layout, none, selective, block)
        assert block < selective < 0.8 * none, (layout, none, selective, block)


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"images": torch.randn(1, 8, 8, generator=generator), "label": torch.tensor(place % 10)}


def build_resnet() -> nn.Module:
    return Resnet(ResnetModel(kind="resnet", blocks=[1, 2], width=4), 1, 10)


def train_images(world: Any, layouts: list[str]) -> list[tuple[str, dict[str, Tensor]]]:
    return [(layout, _train_images(layout)) for layout in layouts]


def _train_images(layout: str) -> dict[str, Tensor]:
    trainer = paceline.Trainer(
        build_resnet,
        forward=lambda model, batch: model(batch["images"]),
        loss=lambda logits, batch: nn.functional.cross_entropy(logits, batch["label"]),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        layout=layout,
        microbatch_size=3,
        dtype="fp64",
        reduction="fast",
    )
    for number, share in enumerate(trainer.loader(Images(), global_batch_size=10), start=1):
        trainer.step(share)
        if number == STEPS:
            break
    found = trainer.whole_state()
    trainer.close()
    return found


def test_running_statistics_are_those_of_one_process(ranks: Pool) -> None:
    """With and without recompute, under all layouts of batch norm."""
    ((_, one),) = ranks.run(train_images, 1, ([""],))[0]
    assert int(one["stem_norm.num_batches_tracked"]) == 4 * STEPS
    assert int(one["blocks.1.norm2.num_batches_tracked"]) == 4 * STEPS
    layouts = {
        1: ["recompute=block", "recompute=selective"],
        2: ["dp_replicate=2 recompute=block", "dp_shard=2", "dp_shard=2 zero=1 recompute=selective"],
        4: ["dp_replicate=2 dp_shard=2", "dp_shard=4 recompute=block"],
    }
    for nproc, words in layouts.items():
        for layout, found in ranks.run(train_images, nproc, (words,), timeout_s=60)[0]:
            assert distance(one, found) < 1e-10, layout


def train_without_blocks(world: Any) -> None:
    paceline.Trainer(
        nn.Linear(4, 4),
        loss=lambda output, batch: output.sum(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout="recompute=block",
    )


def test_a_model_without_blocks_is_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"recompute=block for a model without repeated blocks.*\[PL143\]"):
        ranks.run(train_without_blocks, 1)
