"""Updates without waiting: the numbers of a plain loop, the bound, replays on other ranks, and refusals."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from paceline.errors import PacelineError
from paceline.recipe import Layout, Rules, dump_recipe, load_recipe
from paceline.train.asynchronous import UpdateRow, Workers, find_oldest, read_updates
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError

SAMPLES = torch.randn(8 * 7, 40, generator=torch.Generator().manual_seed(7))
NUM_STEPS = 30  # four epochs and two batches


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))


def loss_of(output: Tensor, batch: Tensor) -> tuple[Tensor, Any]:
    return (output - batch[:, :8]).square().sum(), len(output)


def build(**settings: Any) -> Trainer:
    given: dict[str, Any] = {
        "loss": loss_of,
        "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.5),
        "microbatch_size": 4,
        "clip_norm": 0.5,
        "reduction": "exact",
    }
    return Trainer(settings.pop("model", None) or build_model(), **(given | settings))


def train(world: Any, folder: str | None, updates: list[UpdateRow] | None, dtype: str, bound: int) -> Any:
    """Train two periods, in which the last rank is slow; return weights, statistics and losses."""
    trainer = build(dtype=dtype)
    if world.rank == world.world_size - 1 and updates is None:
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.004))
    loader = trainer.loader(SAMPLES, global_batch_size=8)
    if folder is not None:
        trainer.resume(folder)
    losses = []
    for start, stop in ((0, 12), (12, NUM_STEPS)):
        steps = (
            trainer.step_asynchronously(loader, stop - start, staleness=bound)
            if updates is None
            else trainer.replay_updates(loader, updates[start:stop])
        )
        losses += [step.loss for step in steps]
        if folder is not None:
            trainer.save(wait=True)
    assert trainer.step_number == NUM_STEPS
    return trainer.whole_state(), losses


def train_plainly(rows: list[UpdateRow], order: list[Tensor]) -> dict[str, Tensor]:
    """Apply a record by a loop of plain torch in one process."""
    model = build_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    versions = [copy.deepcopy(model)]
    for row in rows:
        stale = copy.deepcopy(versions[row.version])
        total = torch.zeros((), dtype=torch.float64)
        for batch in order[row.batch].double().split(4):
            loss_sum, _ = loss_of(stale(batch), batch)
            total = total + loss_sum / 8
        total.backward()
        for p, pushed in zip(model.parameters(), stale.parameters(), strict=True):
            p.grad = pushed.grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        versions.append(copy.deepcopy(model))
    return dict(model.named_parameters())


def read_order(world: Any) -> list[Tensor]:
    loader = build().loader(SAMPLES, global_batch_size=8)
    return [torch.cat([batch for _, batch in share.microbatches]) for _ in range(5) for share in loader]


@pytest.mark.parametrize("bound", [1, 6])
def test_updates_are_those_of_a_plain_loop_and_replay(ranks: Pool, tmp_path: Path, bound: int) -> None:
    folder = tmp_path / "run"
    (weights, losses), *others = ranks.run(train, nproc=3, args=(str(folder), None, "fp64", bound))
    rows = [UpdateRow(**json.loads(line)) for line in (folder / "updates.jsonl").read_text().splitlines()]
    assert [row.step for row in rows] == list(range(1, NUM_STEPS + 1))
    assert sorted(row.batch for row in rows) == list(range(NUM_STEPS))  # each one once
    assert 1 <= max(row.staleness for row in rows) <= bound
    assert all(each == losses for _, each in others)
    [order] = ranks.run(read_order, nproc=1)
    for name, p in train_plainly(rows, order).items():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-6, atol=1e-8)
    for nproc in (1, 2):
        found, again = ranks.run(train, nproc=nproc, args=(None, rows, "fp64", bound))[0]
        assert again == losses
        assert all(torch.equal(found[name], value) for name, value in weights.items())


def train_alone(world: Any) -> list[bool]:
    """Compare one worker, which is never stale, with plain training."""
    found = train(world, None, None, "fp32", 1)[0]
    trainer = build()
    loader = trainer.loader(SAMPLES, global_batch_size=8)
    for _ in range(5):
        for share in loader:
            if trainer.step_number < NUM_STEPS:
                trainer.step(share)
    return [torch.equal(found[name], value) for name, value in trainer.whole_state().items()]


def test_one_worker_is_plain_training(ranks: Pool) -> None:
    [same] = ranks.run(train_alone, nproc=1)
    assert same
    assert all(same)


def refuse(world: Any, layout: str, settings: dict[str, Any], staleness: int) -> None:
    trainer = build(layout=layout, **settings)
    loader = trainer.loader(SAMPLES, global_batch_size=8)
    list(trainer.step_asynchronously(loader, 4, staleness=staleness))


@pytest.mark.parametrize(
    ("layout", "settings", "staleness", "word"),
    [
        ("dp_shard=2", {}, 4, "layout.dp_shard"),
        ("", {"islands": {"count": 2}}, 4, "islands"),
        ("", {"reduction": "fast"}, 4, 'reduction="fast"'),
        ("", {"compress": {"kind": "int8"}}, 4, "compress"),
        ("", {"dtype": "fp16"}, 4, 'dtype="fp16"'),
        ("", {}, 0, "staleness=0"),
    ],
)
def test_refused_settings(
    ranks: Pool, layout: str, settings: dict[str, Any], staleness: int, word: str
) -> None:
    with pytest.raises(RankError, match="PL677") as raised:
        ranks.run(refuse, nproc=2, args=(layout, settings, staleness))
    assert word in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([], "ends after update 0"),
        ([UpdateRow(2, 0, 1, 0)], "after update 0 the record has updates"),
        ([UpdateRow(1, 0, 0, 1)], "other global batches"),
        ([UpdateRow(1, 0, 1, 0)], "computed on version 1"),
    ],
)
def test_a_record_that_does_not_fit(rows: list[UpdateRow], word: str) -> None:
    with pytest.raises(PacelineError, match=word) as raised:
        find_oldest(rows, step=0, batch=0)
    assert raised.value.code == "PL678"


def test_versions_are_kept_as_long_as_needed() -> None:
    rows = [UpdateRow(1, 0, 0, 0), UpdateRow(2, 1, 0, 1), UpdateRow(3, 0, 1, 2), UpdateRow(4, 0, 3, 3)]
    assert find_oldest(rows, step=0, batch=0) == [0, 0, 1, 3]


def test_workers_are_not_called_idle() -> None:
    """A rank computes a whole global batch, so one of few microbatches is enough for many ranks."""
    for staleness, codes in ((0, ["PL131"]), (2, [])):
        settings = [f"asynchronous.staleness={staleness}", "train.reduction=exact"]
        found = Rules.of(load_recipe("gpt-stdlib", settings)).remark(Layout(dp_replicate=8), 8)
        assert [finding.code for finding in found if finding.code == "PL131"] == codes


def test_a_record_needs_its_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("gpt-stdlib", ["asynchronous.staleness=2"])
    record = tmp_path / "updates.jsonl"
    record.write_text(
        '{"step": 1, "worker": 0, "version": 0, "batch": 0}\n{"step": 2, "wor'
    )  # torn by a kill
    with pytest.raises(PacelineError, match="PL678"):
        read_updates(record, recipe)
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert read_updates(record, recipe) == [UpdateRow(1, 0, 0, 0)]
    with pytest.raises(PacelineError, match="PL530"):
        read_updates(record, load_recipe("gpt-stdlib", ["asynchronous.staleness=3"]))
    record.write_text('{"step": 1, "worker": 0}\n')
    with pytest.raises(PacelineError, match="PL678"):
        read_updates(record, recipe)


def test_a_rank_that_does_not_push_ends_the_wait_of_the_others() -> None:
    """Rank 1 has pulled, and its update could come too late for another pull."""
    world: Any = SimpleNamespace(rank=0, world_size=1, is_main=True, timeout_s=0.1, store=HashStore())
    workers = Workers(world, 0, first_step=0, first_batch=0, num_steps=3)
    state = {"end": 3, "taken": 1, "applied": 0, "stop": 0, "out": {"1": 0}}
    world.store.set("asynchronous/0/state", json.dumps(state))
    with pytest.raises(PacelineError, match=r"rank 1 computes one.*\[PL679\]"):
        next(workers.run(lambda batch: torch.zeros(1), lambda: 0))
