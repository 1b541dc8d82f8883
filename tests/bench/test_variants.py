"""Ways that take turns: sizes of buckets, reductions, threads of a process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.bench import variants
from paceline.bench.rank.replicas import Replicas
from paceline.bench.rank.timing import ALONE, WHOLE, RankTimes, TimeSettings
from paceline.bench.starts import Measured, Run
from paceline.bench.variants import keep_distinct, measure_buckets, measure_dp, measure_overhead
from paceline.cli.bench import parse_sizes
from paceline.cli.bench_report import describe_buckets, describe_dp, describe_overhead
from paceline.errors import PacelineError
from tests.bench.recipes import tiny_recipe

SCRIPT = Measured(words=("train.py",))


def rank_of(modes: dict[str, list[float]], **more: object) -> RankTimes:
    samples = {mode: [8.0] * len(blocks) for mode, blocks in modes.items()}
    return RankTimes(modes, modes, samples, **{"gradient_bytes": 60 << 20, "left_out": 1, **more})  # type: ignore[arg-type]


def plant(monkeypatch: pytest.MonkeyPatch, step_s: dict[object, list[float]]) -> None:
    """Have starts take given times, by size of bucket (`None`: the script's own) or number of ranks."""
    taken: dict[object, int] = {}
    monkeypatch.setattr(variants, "check_launch", lambda *args: None)

    def run(job: Measured, num_ranks: int, threads: int, settings: TimeSettings, grow: int = 1) -> Run:
        if settings.warm_up == 1:
            return Run([rank_of({WHOLE: [1.0]})] * num_ranks, None)
        key = settings.bucket_mib if num_ranks in (1, 2) and num_ranks not in step_s else num_ranks
        number = taken[key] = taken.get(key, -1) + 1
        first, second = rank_of({WHOLE: [step_s[key][number] / 2]}), rank_of({WHOLE: [step_s[key][number]]})
        return Run([first, second][-num_ranks:], None)

    monkeypatch.setattr(Measured, "run", run)


def test_the_best_size_is_told_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    half = [seconds / 2 for seconds in own]
    plant(monkeypatch, {None: own, 5.0: [2.4] * 6, 100.0: half})
    out = describe_buckets(measure_buckets(SCRIPT, 2, (5, 25, 100)))
    assert "best: bucket_cap_mb=100, 0.500 of 25 MiB" in out
    lines = {line.split()[0]: line for line in out.splitlines() if " MiB " in line}
    assert "2400 ms" in lines["5"], "a step takes as long as its slowest rank"
    assert lines["100"].endswith("one bucket holds all")
    assert not lines["25"].endswith("one bucket holds all")


def test_noise_is_not_called_better(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {None: [1.0] * 6, 50.0: [0.9, 1.1, 0.9, 1.1, 0.9, 0.9]})
    out = describe_buckets(measure_buckets(SCRIPT, 2, (50,)))
    assert "no size is faster than 25 MiB beyond the noise" in out
    plant(monkeypatch, {None: [1.0] * 6, 50.0: [0.8, 1.6, 0.8, 1.6, 0.8, 0.8]})
    assert "No information: a ratio of 0.80 (0.80..1.60)" in describe_buckets(
        measure_buckets(SCRIPT, 2, (50,))
    )


def test_threads_are_compared_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {1: [2.0] * 6, 2: [1.0] * 6})
    out = describe_dp(measure_dp(SCRIPT, 2))
    assert "a sample on ranks takes 0.25 of the time with threads" in out, "8 samples against 16"
    assert "each: 60.0 MiB" in out, "a ring sends 2 (n - 1) / n of the gradients"


def test_compute_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "check_launch", lambda *args: None)
    ranks = [
        rank_of({WHOLE: [10.0, 20.0], ALONE: [8.0, 16.0]}),
        rank_of({WHOLE: [10.0, 20.0], ALONE: [4.0, 8.0]}),
    ]
    monkeypatch.setattr(Measured, "run", lambda *args, **kwargs: Run(ranks, None))
    found = measure_overhead(SCRIPT, 2)
    assert found.ways[ALONE].ratio.median == pytest.approx(0.8)
    assert "share of communication  20.0%" in describe_overhead(found)
    assert "No information" not in describe_overhead(found)
    json.dumps(asdict(found))
    for rank in ranks:
        rank.left_out = 0
    with pytest.raises(PacelineError, match="PL956"):
        measure_overhead(SCRIPT, 2)


def test_sizes_that_hold_everything_are_one() -> None:
    assert keep_distinct([1, 5, 10, 25, 50], own=25, gradient_bytes=8 << 20) == [1, 5]
    assert keep_distinct([1, 5, 50, 100], own=5, gradient_bytes=40 << 20) == [1, 50]


@pytest.mark.parametrize("text", ["", "0", "5,-1", "nan", "5,inf", "5;25", "5,"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    assert parse_sizes("5, 25,0.5") == [5.0, 25.0, 0.5]
    with pytest.raises(PacelineError, match="PL620"):
        parse_sizes(text)


def test_refuses_one_rank_and_numbers_below_one(tmp_path: Path) -> None:
    job = Measured(recipe=tiny_recipe(tmp_path))
    for measure in (measure_overhead, measure_buckets, measure_dp):
        with pytest.raises(PacelineError, match="PL622"):
            measure(job, 1)
        with pytest.raises(PacelineError, match=r"steps=0\..*PL620"):
            measure(job, 2, steps=0)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": self.one(x) * scale, "two": self.two(x).tanh()}


@pytest.mark.parametrize("num_samples", [7, 2, 1])
def test_threads_compute_what_the_module_does(num_samples: int) -> None:
    torch.manual_seed(0)
    module, x = TwoOutputs(), torch.randn(num_samples, 4)
    scale = torch.tensor(2.0)

    def compute(call: object) -> list[torch.Tensor]:
        module.zero_grad()
        out = call(x, scale=scale)  # type: ignore[operator]
        (out["one"].square().sum() + out["two"].sum()).backward()
        grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return [out["one"].detach(), out["two"].detach(), *grads]

    expected = compute(module)
    replicas = Replicas(torch, module, 3)
    for _ in range(2):
        torch.testing.assert_close(compute(replicas), expected)
    assert len(expected) == 6
    with torch.no_grad():
        module.one.weight.add_(1.0)
    torch.testing.assert_close(compute(replicas), compute(module))
