"""The exact reduction in the corners: unused parameters, bad microbatches, several models, resuming."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.errors import PacelineError
from paceline.place import usable_cores
from paceline.recipe import parse_recipe
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool
from tests.train.cases import Trained, take_steps, text_recipe, train_recipe_table

GLOBAL_BATCH, MICROBATCH = 14, 2


class Data(Dataset[dict[str, Tensor]]):
    """54 samples: three global batches of seven microbatches, and a ragged one of six."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 54

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        x = torch.randn(6, generator=generator) * (torch.nan if place == self.bad else 1)
        return {
            "x": x,
            "route": torch.tensor(place // MICROBATCH % 3),
            "counts": torch.tensor(place % 11 > 3),
        }


class Branching(nn.Module):
    """Microbatches take one of two ways or none, and one layer is on neither."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()])
        self.idle = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        way = self.ways[int(route[0])]
        output: Tensor = self.head(self.drop(self.norm(torch.tanh(way(torch.tanh(self.stem(x)))))))
        return output


def build_trainer(**settings: Any) -> Trainer:
    return Trainer(
        Branching,
        forward=lambda model, batch: model(batch["x"], batch["route"]),
        # Weighted unevenly: some microbatches count for nothing.
        loss=lambda output, batch: (
            (output.square().sum(1) * batch["counts"]).sum(),
            batch["counts"].sum(),
        ),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1),
        **{"reduction": "exact", "microbatch_size": MICROBATCH, "clip_norm": 0.3, **settings},
    )


def train(world: Any, settings: dict[str, Any], bad: int | None = None) -> Trained:
    trainer = build_trainer(**settings)
    loader = trainer.loader(Data(bad), global_batch_size=GLOBAL_BATCH, shuffle=False, epochs=2)
    return take_steps(trainer, loader)


def show(trained: Trained) -> tuple[Any, ...]:
    return (trained.hash, str(trained.losses), str(trained.grad_norms), trained.weights, trained.skipped)


FIND = {"find_unused_parameters": True, "bucket_cap_mb": 0.0003}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ddp", [FIND, {**FIND, "gradient_as_bucket_view": False}])
def test_parameters_that_some_or_all_microbatches_leave_out(
    ranks: Pool, ddp: dict[str, Any], dtype: str
) -> None:
    settings = {"ddp": ddp, "dtype": dtype}
    expected = ranks.run(train, 1, (settings,))[0]
    assert len(set(expected.weights)) > 1
    for nproc in (2, 3, 8):
        for trained in ranks.run(train, nproc, (settings,)):
            assert show(trained) == show(expected)


def test_a_bad_microbatch_skips_the_same_step(ranks: Pool) -> None:
    expected = ranks.run(train, 1, ({"ddp": FIND}, 17))[0]
    assert [reason is not None for reason in expected.skipped] == [False, True, False, False] * 2
    for nproc in (2, 4):
        for trained in ranks.run(train, nproc, ({"ddp": FIND}, 17)):
            assert show(trained) == show(expected)


def train_two(world: Any) -> Trained:
    """Two models in turn, each with a reduction of its own."""
    make = lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))  # noqa: E731
    trainer = Trainer(
        {"first": make, "second": make},
        step=lambda update: (
            update("first", lambda m, b: ((m["second"](m["first"](b["x"])) - 1).square().sum(), len(b["x"]))),
            update("second", lambda m, b: (m["second"](m["first"](b["x"])).abs().sum(), len(b["x"]))),
        ),
        optimizer={
            name: lambda named: torch.optim.SGD([p for _, p in named], lr=0.01)
            for name in ("first", "second")
        },
        microbatch_size=MICROBATCH,
        reduction="exact",
        ddp={"bucket_cap_mb": 0.0003},
    )
    return take_steps(trainer, trainer.loader(Data(), global_batch_size=GLOBAL_BATCH, epochs=3))


def test_several_models_have_the_same_bits(ranks: Pool) -> None:
    expected = ranks.run(train_two, 1)[0]
    for nproc in (2, 3):
        for trained in ranks.run(train_two, nproc):
            assert show(trained) == show(expected)


def train_raw(world: Any, counts: list[int]) -> Trained:
    """Each rank brings samples of its own, in numbers of its own; together always the same."""
    trainer = build_trainer(ddp=FIND)
    start_at = sum(counts[: world.rank])
    data = Data()

    def batch(step: int) -> dict[str, Tensor]:
        own = [data[step * 16 + place] for place in range(start_at, start_at + counts[world.rank])]
        if not own:
            return {key: value[None][:0] for key, value in data[0].items()}
        return {key: torch.stack([sample[key] for sample in own]) for key in own[0]}

    return take_steps(trainer, [batch(step) for step in range(3)])


def test_samples_that_ranks_bring_along(ranks: Pool) -> None:
    expected = ranks.run(train_raw, 1, ([16],))[0]
    for counts in ([8, 8], [2, 14], [16, 0], [0, 6, 10], [4, 4, 4, 4]):
        for trained in ranks.run(train_raw, len(counts), (counts,)):
            assert show(trained) == show(expected), counts


def step_on_nothing(world: Any) -> tuple[str | None, float]:
    trainer = build_trainer(ddp=FIND)
    empty = {key: value[None][:0] for key, value in Data()[0].items()}
    step = trainer.step(empty)
    return step.skipped, step.grad_norm


@pytest.mark.parametrize("nproc", [1, 3])
def test_no_samples_at_all_skip_the_step(ranks: Pool, nproc: int) -> None:
    for skipped, norm in ranks.run(step_on_nothing, nproc):
        assert skipped is not None
        assert norm == 0


def train_part(world: Any, table: dict[str, Any], folder: str, until: int) -> tuple[str, list[float]]:
    from paceline.data import build_data
    from paceline.train.run import build_loader
    from paceline.train.run import build_trainer as build

    recipe = parse_recipe(table, ["train.reduction=exact", "train.steps=12", "ddp.bucket_cap_mb=0.01"])
    data = build_data(recipe)
    trainer = build(recipe, data, 12)
    loader = build_loader(recipe, trainer, data.train, train=True)
    trainer.resume(folder)
    losses = []
    while trainer.step_number < until:
        for share in loader:
            losses.append(trainer.step(share).loss)
            if trainer.step_number == until:
                break
    trainer.save()
    return Trained().finish(trainer).hash, losses


def test_resumed_on_another_number_of_ranks_each_time(ranks: Pool, tmp_path: Path) -> None:
    table = text_recipe(tmp_path / "data")
    ((whole, losses),) = ranks.run(train_part, 1, (table, str(tmp_path / "whole"), 12))
    found: list[float] = []
    for nproc, until in ((3, 2), (1, 3), (4, 7), (2, 8), (8, 12)):
        results = ranks.run(train_part, nproc, (table, str(tmp_path / "parts"), until))
        assert len({digest for digest, _ in results}) == 1
        found += results[0][1]
    assert found == losses
    assert results[0][0] == whole


def test_resuming_with_the_other_reduction_warns(
    ranks: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(device="cpu", threads_per_rank=1):
        for reduction in ("fast", "exact"):
            trainer = build_trainer(reduction=reduction)
            trainer.resume(tmp_path / "run")
            for share in trainer.loader(Data(), global_batch_size=GLOBAL_BATCH, epochs=1):
                trainer.step(share)
                break
            trainer.save()
    assert "how gradients are summed was 'fast' and is 'exact'" in caplog.text


def test_threads_do_not_follow_from_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    with start(device="cpu"):
        build_trainer(reduction="fast")
        assert torch.get_num_threads() == usable_cores()
        with caplog.at_level(logging.WARNING):
            build_trainer()
        assert torch.get_num_threads() == 1
        assert ("1 CPU thread per rank" in caplog.text) == (usable_cores() > 1)
    assert torch.get_num_threads() == before, "given back at the end"
    with start(device="cpu", threads_per_rank=2):
        build_trainer()
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("settings", "code", "seen"),
    [
        ({"reduction": "exakt"}, "PL400", "exakt"),
    ],
)
def test_what_would_not_be_exact_is_refused(settings: dict[str, Any], code: str, seen: str) -> None:
    with start(device="cpu", threads_per_rank=1), pytest.raises(PacelineError, match=code) as caught:
        build_trainer(**settings)
    assert seen in caught.value.saw


def test_sparse_gradients_are_refused() -> None:
    def build(model: nn.Module, loss: Any) -> Trainer:
        return Trainer(
            model,
            loss=loss,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            reduction="exact",
        )

    def square(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return output.square().sum(), len(batch)

    with start(device="cpu", threads_per_rank=1):
        with pytest.raises(PacelineError, match=r"0 \(Embedding\) is built with sparse=True.*PL425"):
            build(nn.Sequential(nn.Embedding(4, 2, sparse=True)), square)

        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.randn(4, 2))

            def forward(self, ids: Tensor) -> Tensor:
                return nn.functional.embedding(ids, self.table, sparse=True)

        with pytest.raises(PacelineError, match="PL425"):
            build(Hidden(), square).step(torch.tensor([1, 2, 3]))


def test_the_fast_reduction_differs_here(ranks: Pool, tmp_path: Path) -> None:
    """Or the tests above would show nothing."""
    table = text_recipe(tmp_path / "data")
    hashes = {
        reduction: {
            ranks.run(train_recipe_table, n, (table, [f"train.reduction={reduction}"], 6))[0].hash
            for n in (1, 3, 4)
        }
        for reduction in ("fast", "exact")
    }
    assert len(hashes["exact"]) == 1
    assert len(hashes["fast"]) > 1
