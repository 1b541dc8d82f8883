"""Pipelines go with the other parallelisms: fast sums, recompute, shards, tp; and keep the numbers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import hash_tensors
from paceline.models.resnet import Resnet
from paceline.parallel.placement import local
from paceline.recipe.schema import ResnetModel
from tests.dist.pool import Pool
from tests.train.test_layout_checkpoints import build_gpt, next_token_loss, run
from tests.train.test_pipeline import GPT_EXAMPLE, Ids, go_on


def deep_gpt() -> nn.Module:
    return build_gpt(layers=4)


def build(layout: str, **settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        settings.pop("model", deep_gpt),
        **{
            "forward": run,
            "loss": next_token_loss,
            "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
            "layout": layout,
            "example": GPT_EXAMPLE,
            "microbatch_size": 2,
            "clip_norm": 0.5,
            **settings,
        },
    )


def train(world: Any, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Return a hash of all weights, the losses and the norms of two steps, per layout and settings."""
    found = []
    for layout, settings in cases:
        trainer = build(layout, **settings)
        steps = [trainer.step(share) for share in trainer.loader(Ids(), global_batch_size=11)]
        state = trainer.whole_state()
        hashed = hash_tensors(state) if world.is_main else ""
        found.append((hashed, [step.loss for step in steps], [step.grad_norm for step in steps]))
        trainer.close()
    return found


RECOMPUTED = [
    ("pp=2 recompute=block", {}),
    ("pp=2 recompute=selective schedule=interleaved chunks=2", {}),
]


def test_recompute_keeps_the_bits_of_a_pipeline(ranks: Pool) -> None:
    [alone] = ranks.run(train, 1, ([("", {})],))[0]
    assert ranks.run(train, 2, (RECOMPUTED,))[0] == [alone] * 2


def train_long(world: Any, layout: str, dtype: str) -> str:
    """Return a hash of all weights after 20 steps of 11 samples by 2."""
    trainer = build(layout, dtype=dtype)
    loader = trainer.loader(Ids(), global_batch_size=11)
    while trainer.step_number < 20:
        for share in loader:
            trainer.step(share)
    state = trainer.whole_state()
    trainer.close()
    return hash_tensors(state) if world.is_main else ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_twenty_steps_end_with_the_hash_of_one_process(ranks: Pool, dtype: str) -> None:
    """The same with processes killed in between: `tests.chaos.run --pipelines`."""
    alone = ranks.run(train_long, 1, ("", dtype), timeout_s=60)[0]
    assert ranks.run(train_long, 2, ("pp=2", dtype), timeout_s=60)[0] == alone
    for layout in ("pp=4", "pp=2 dp_replicate=2", "pp=2 dp_shard=2"):
        assert ranks.run(train_long, 4, (layout, dtype), timeout_s=90)[0] == alone, layout


FAST = {"reduction": "fast", "dtype": "fp64"}


@pytest.mark.parametrize(
    ("nproc", "layouts"),
    [
        (2, ["pp=2", "pp=2 schedule=interleaved chunks=2"]),
        (4, ["pp=2 dp_replicate=2", "pp=2 dp_replicate=2 schedule=bfs chunks=2"]),
    ],
)
def test_fast_sums_have_the_numbers_of_one_process(ranks: Pool, nproc: int, layouts: list[str]) -> None:
    [(_, losses, norms)] = ranks.run(train, 1, ([("", FAST)],))[0]
    for found in ranks.run(train, nproc, ([(layout, FAST) for layout in layouts],))[0]:
        assert found[1] == pytest.approx(losses, rel=1e-12)
        assert found[2] == pytest.approx(norms, rel=1e-10)


SHARDED = [
    "pp=2 dp_shard=2",
    "pp=2 dp_shard=2 zero=1",
    "pp=2 dp_shard=2 zero=2 schedule=interleaved chunks=2 recompute=block",
    "pp=2 dp_shard=2 zero=3 schedule=interleaved chunks=2",
]


def test_shards_keep_the_bits_of_one_process(ranks: Pool) -> None:
    [alone] = ranks.run(train, 1, ([("", {})],))[0]
    cases: list[Any] = [(layout, {}) for layout in SHARDED]
    cases.append(("pp=2 dp_shard=2 zero=3 schedule=bfs chunks=2", {"shard": {"prefetch": 0}}))
    assert ranks.run(train, 4, (cases,), timeout_s=120)[0] == [alone] * len(cases)


def test_fast_sums_of_shards_have_the_numbers_of_one_process(ranks: Pool) -> None:
    [(_, losses, norms)] = ranks.run(train, 1, ([("", FAST)],))[0]
    for found in ranks.run(train, 4, ([(layout, FAST) for layout in SHARDED],), timeout_s=120)[0]:
        assert found[1] == pytest.approx(losses, rel=1e-12)
        assert found[2] == pytest.approx(norms, rel=1e-10)


def few(world: Any, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Losses, norms and an evaluation, where some data ranks have fewer microbatches than others, or none."""
    found = []
    for layout, settings in cases:
        trainer = build(layout, **settings)
        steps = [
            trainer.step(share)
            for size in (5, 2)
            for share in islice(trainer.loader(Ids(), global_batch_size=size, name=str(size)), 2)
        ]
        valid = torch.utils.data.Subset(Ids(), range(3))
        evaluated = trainer.evaluate(trainer.loader(valid, global_batch_size=3, shuffle=False, name="valid"))
        found.append(([(step.loss, step.grad_norm) for step in steps], evaluated.loss))
        trainer.close()
    return found


def test_data_ranks_without_a_microbatch_take_part(ranks: Pool) -> None:
    [alone] = ranks.run(few, 1, ([("", {})],))[0]
    cases: list[Any] = [(layout, {}) for layout in (SHARDED[1], SHARDED[3], "pp=2 dp_replicate=2")]
    assert ranks.run(few, 4, (cases,), timeout_s=120)[0] == [alone] * len(cases)
    [quick] = ranks.run(few, 4, ([(SHARDED[3], FAST)],), timeout_s=120)[0]
    [one] = ranks.run(few, 1, ([("", FAST)],))[0]
    assert quick[1] == pytest.approx(one[1], rel=1e-12)
    assert quick[0] == [pytest.approx(pair, rel=1e-10) for pair in one[0]]


def count_bytes(world: Any, layout: str) -> dict[str, int]:
    """Return bytes of this rank's parameters, gradients and moments, by storage."""
    found: dict[str, int] = {}
    trainer = build(layout, dtype="fp32")

    def count(gradients: dict[str, torch.Tensor]) -> None:
        found["gradients"] = _sum_bytes(gradients.values())

    trainer.on_gradients(count)
    trainer.step({"ids": torch.zeros(4, 9, dtype=torch.int64)})
    named = dict(trainer.model.named_parameters())
    moments = [
        value for each in trainer._updates["model"].optimizer.state.values() for value in each.values()
    ]
    found["parameters"] = _sum_bytes(named.values())
    found["moments"] = _sum_bytes(value for value in moments if value.dim())
    placement = trainer._updates["model"].placement
    found["expected"] = sum(
        4 * placement.part(name, torch.empty(p.shape, device="meta"), p).numel()
        for name, p in named.items()
        if placement.holds(name)
    )
    trainer.close()
    return found


def _sum_bytes(tensors: Any) -> int:
    storages = {local(t).untyped_storage().data_ptr(): local(t) for t in tensors if not local(t).is_meta}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def test_a_rank_has_the_rows_of_its_stages_alone(ranks: Pool) -> None:
    for found in ranks.run(count_bytes, 4, ("pp=2 dp_shard=2 zero=3",)):
        expected, gradients = found["expected"], found.pop("gradients")
        assert found == {"parameters": expected, "moments": 2 * expected, "expected": expected}
        assert expected <= gradients < 1.01 * expected, "and a number per parameter: whether it is used"


def test_a_run_goes_on_under_sharded_pipelines(ranks: Pool, tmp_path: Path) -> None:
    """Whole and sharded checkpoints, saved and loaded by sharded pipelines and one process."""
    undisturbed = ranks.run(go_on, 1, ("", str(tmp_path / "alone"), 4, "full", False))[0]
    folder = str(tmp_path / "moved")
    ranks.run(go_on, 4, ("pp=2 dp_shard=2", folder, 1, "sharded", False), timeout_s=60)
    ranks.run(go_on, 2, ("dp_shard=2", folder, 2, "full", False), timeout_s=60)
    ranks.run(go_on, 4, ("pp=2 dp_shard=2 zero=1", folder, 3, "full", False), timeout_s=60)
    assert ranks.run(go_on, 2, ("pp=2", folder, 4, "sharded", False), timeout_s=60)[0] == undisturbed


SPLIT = [
    "pp=2 tp=2",
    "pp=2 tp=2 sequence=true schedule=interleaved chunks=2",
    "pp=2 tp=2 recompute=selective",
]
HEADS = {"example": {"ids": torch.zeros(4, 9, dtype=torch.int64)}, "dtype": "fp64"}


def test_tp_inside_of_stages_has_the_numbers_of_one_process(ranks: Pool) -> None:
    [(_, losses, norms)] = ranks.run(train, 1, ([("", HEADS)],))[0]
    for found in ranks.run(train, 4, ([(layout, HEADS) for layout in SPLIT],), timeout_s=200)[0]:
        assert found[1] == pytest.approx(losses, rel=1e-12)
        assert found[2] == pytest.approx(norms, rel=1e-10)


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"images": torch.randn(1, 8, 8, generator=generator), "label": torch.tensor(place % 10)}


def train_images(world: Any, layouts: list[str]) -> list[Any]:
    """Return a hash of weights and running statistics, losses, norms and an evaluation, per layout."""
    found = []
    for layout in layouts:
        trainer = build(
            layout,
            model=lambda: Resnet(ResnetModel(kind="resnet", blocks=[2, 2], width=4), 1, 10),
            forward=lambda model, batch: model(batch["images"]),
            loss=lambda logits, batch: nn.functional.cross_entropy(logits, batch["label"]),
            example={"images": torch.zeros(2, 1, 8, 8), "label": torch.zeros(2, dtype=torch.int64)},
        )
        steps = [trainer.step(share) for share in trainer.loader(Images(), global_batch_size=11)]
        evaluated = trainer.evaluate(
            trainer.loader(Images(), global_batch_size=8, shuffle=False, name="valid")
        )
        state = trainer.whole_state()
        hashed = hash_tensors(state) if world.is_main else ""
        found.append((hashed, [(step.loss, step.grad_norm) for step in steps], evaluated.loss))
        trainer.close()
    return found


def test_running_statistics_are_those_of_one_process(ranks: Pool) -> None:
    alone = ranks.run(train_images, 1, ([""],))[0]
    two = ["pp=2", "pp=2 schedule=interleaved chunks=2 recompute=block"]
    assert ranks.run(train_images, 2, (two,), timeout_s=90)[0] == alone * 2
    assert ranks.run(train_images, 4, (["pp=2 dp_shard=2"],), timeout_s=90)[0] == alone
