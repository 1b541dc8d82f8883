"""The waits of a pipeline: simulated and measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bench.pipeline import _choose, _summarise, measure_pipeline
from paceline.errors import PacelineError
from paceline.pipeline.orders import make_schedule
from paceline.pipeline.simulate import Costs, simulate
from tests.bench.recipes import tiny_recipe


def test_measures_real_ranks_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path, "model.layers=4", "train.global_batch_size=8")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    waits, runs = measure_pipeline(recipe, 2, ["1f1b", "zbv"], steps=3)
    assert list(work.iterdir()) == []
    assert (waits.num_ranks, waits.num_microbatches, waits.num_steps, waits.device) == (2, 4, 3, "cpu")
    assert [(each.name, each.stages_per_rank) for each in waits.schedules] == [("1f1b", 1), ("zbv", 2)]
    assert waits.schedules[0].formula == pytest.approx(1 / 5)
    assert waits.schedules[1].formula is None
    for each, run in zip(waits.schedules, runs, strict=True):
        assert 0 < each.simulated.median < 1
        assert 0 < each.measured.median < 1
        schedule = make_schedule(each.name, 2, 4)
        assert tuple(tuple(s.action for s in spans) for spans in run.measured.spans) == schedule.actions
        assert run.measured.idle_share == each.measured.median
        for spans in run.measured.spans:
            assert all(a.end <= b.start for a, b in pairwise(spans))
    json.dumps(asdict(waits))


def test_each_step_is_compared_with_its_own_simulation() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    even, uneven = simulate(schedule), simulate(schedule, Costs([1.0, 3.0]))
    waits = _summarise(schedule, [even, uneven, uneven])
    assert waits.measured.median == pytest.approx(uneven.idle_share)
    assert waits.equal == pytest.approx(1 / 5)
    assert (waits.difference.low, waits.difference.high) == pytest.approx((0, 0), abs=1e-12)
    assert _choose(schedule, [even, uneven, uneven]).measured is uneven


def test_what_can_not_be_measured_is_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(PacelineError, match="PL480"):
        measure_pipeline(recipe, 1)
    with pytest.raises(PacelineError, match=r"steps=0\..*PL620"):
        measure_pipeline(recipe, 2, steps=0)
    with pytest.raises(PacelineError, match="dualpipev with 3 microbatches"):
        measure_pipeline(recipe, 2, ["dualpipev"])
    with pytest.raises(PacelineError, match="PL474"):
        measure_pipeline(recipe, 2, ["1b1f"])


def record_without_pp(world: Any) -> str:
    import torch

    model = torch.nn.Linear(2, 1)
    trainer = paceline.Trainer(
        model,
        loss=lambda out, batch: out.mean(),
        optimizer=lambda n: torch.optim.SGD(model.parameters(), lr=1),
    )
    try:
        with trainer.recording_actions():
            return "recorded"
    except PacelineError as error:
        return error.code


def test_actions_are_those_of_a_pipeline(ranks: Any) -> None:
    assert ranks.run(record_without_pp, 1) == ["PL493"]
