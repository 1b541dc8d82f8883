"""The cut of a model: by counted operations, as evenly as any cut can be, or by measured times."""

from __future__ import annotations

import logging
import math
import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.parallel.blocks import find_blocks
from paceline.parallel.stages.plan import find_starts
from paceline.parallel.stages.record import record_forward
from tests.dist.pool import Pool, RankError
from tests.parallel.stages.models import WIDTH, Outside, call
from tests.train.test_pipeline import build, train
from tests.train.test_pipeline_layouts import HEADS
from tests.train.test_pipeline_layouts import train as train_layouts

NARROW, WIDE = 64, 256
INNER = [*[NARROW] * 5, *[WIDE] * 3]


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Unequal(nn.Module):
    """Blocks whose widths are 1 to 4, and a head with half of the operations of all blocks."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = NARROW * scale
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Mlp(width, inner * scale) for inner in INNER)
        self.leave = nn.Linear(width, sum(INNER) * scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        done: Tensor = self.leave(x)
        return done


def cut_by_trying(costs: list[float], num_stages: int) -> float:
    """Return the cost of the most expensive stage, in the best of all contiguous cuts."""
    return min(
        max(sum(costs[first:last]) for first, last in zip((0, *cut), (*cut, len(costs)), strict=True))
        for cut in combinations(range(1, len(costs)), num_stages - 1)
    )


def worst(costs: list[float], starts: tuple[int, ...]) -> float:
    return max(sum(costs[first:last]) for first, last in pairwise(starts))


def test_the_slowest_stage_is_that_of_the_best_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_segments in (3, 5, 9, 12):
        for num_stages in (2, 3):
            costs = torch.rand(num_segments, generator=generator).square().tolist()
            starts = find_starts(costs, num_stages)
            assert worst(costs, starts) == pytest.approx(cut_by_trying(costs, num_stages))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_unequal_blocks_and_a_head_are_cut_within_two_percent_of_the_best(num_stages: int) -> None:
    model = Unequal()
    x = torch.randn(3, 5, 4)
    record = record_forward(
        model, [name for name, _ in find_blocks(model)], lambda: model(x), torch.device("cpu")
    )
    blocks = [4.0 * 15 * NARROW * inner for inner in INNER]
    head = 2.0 * 15 * NARROW * sum(INNER)
    assert head == sum(blocks) / 2
    true = [2.0 * 15 * 4 * NARROW, *blocks[:-1], blocks[-1] + head]
    starts = find_starts(record.costs, num_stages)
    assert worst(true, starts) <= 1.02 * cut_by_trying(true, num_stages)


class Series(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((32, 4), index / 64), "y": torch.zeros(())}


def reduce(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def compute_steps(world: Any, layout: str, num_steps: int) -> float:
    """The least CPU seconds of a step on this rank, which other processes hardly lengthen."""
    trainer = build(
        layout,
        lambda: Unequal(3),
        loss=reduce,
        example={"x": torch.zeros(2, 32, 4), "y": torch.zeros(2)},
        microbatch_size=4,
    )
    share = next(iter(trainer.loader(Series(), global_batch_size=32)))
    least = math.inf
    for _ in range(num_steps):
        started_s = time.process_time()
        trainer.step(share)
        least = min(least, time.process_time() - started_s)
    trainer.close()
    return least


def test_the_slowest_stage_computes_less_than_that_of_the_even_cut(ranks: Pool) -> None:
    found, even = (ranks.run(compute_steps, 2, (layout, 4)) for layout in ("pp=2", "pp=2 stages=4+4"))
    assert max(found) <= 0.85 * max(even), (found, even)


class Sleeping(nn.Module):
    """A block whose time is not that of its operations."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.inner, self._delay_s = nn.Linear(WIDTH, WIDTH), delay_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._delay_s)
        done: Tensor = torch.nn.functional.dropout(self.inner(x), 0.1, self.training)
        return done


class SlowStart(nn.Module):
    """The first two of six blocks take longer than all others; BatchNorm and a buffer of a known value."""

    def __init__(self, delays_s: tuple[float, ...] = (0.05, 0.05, 0.0, 0.0, 0.0, 0.0)) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("factor", torch.tensor(0.5))
        self.blocks = nn.ModuleList(Sleeping(delay_s) for delay_s in delays_s)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        for block in self.blocks:
            h = h + self.factor * block(h)
        done: Tensor = self.leave(h)
        return done


def build_slow_start() -> nn.Module:
    return SlowStart()


def build_quick_start() -> nn.Module:
    return SlowStart((0.0,) * 4)


def find_held(world: Any, layout: str, is_built: bool) -> list[str]:
    """Return the blocks that this rank holds."""
    trainer = build(layout, SlowStart() if is_built else build_slow_start)
    held = {name for name, p in trainer.model.named_parameters() if not p.is_meta}
    trainer.close()
    return sorted({name.split(".")[1] for name in held if name.startswith("blocks.")})


@pytest.mark.parametrize("is_built", [False, True])
def test_times_are_measured_where_operations_do_not_tell(ranks: Pool, is_built: bool) -> None:
    measured = ranks.run(find_held, 2, ("pp=2 stages=measured", is_built), timeout_s=60)
    assert measured == [["0"], ["1", "2", "3", "4", "5"]]
    assert ranks.run(find_held, 2, ("pp=2", is_built), timeout_s=60) == [["0", "1", "2"], ["3", "4", "5"]]


def test_measuring_changes_no_bit(ranks: Pool) -> None:
    """Weights, norms, running statistics and dropout are those of a run that measures nothing."""
    [alone] = ranks.run(train, 1, (Outside, ("",)))[0]
    layouts = (
        "pp=2 stages=measured",
        "pp=2 schedule=zbv stages=measured",
        "pp=2 recompute=block stages=measured",
    )
    assert ranks.run(train, 2, (Outside, layouts), timeout_s=60)[0] == [alone] * 3
    [quick] = ranks.run(train, 1, (build_quick_start, ("",)))[0]
    assert ranks.run(train, 2, (build_quick_start, ("pp=2 stages=measured",)))[0] == [quick]


def log_of(world: Any, layout: str) -> list[str]:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    log, keep = logging.getLogger("paceline"), Keep()
    log.addHandler(keep)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        build(layout, build_slow_start).close()
    finally:
        log.removeHandler(keep)
        log.setLevel(before)
    return [line for line in lines if line.startswith("pp:")]


def test_the_measured_shares_are_logged(ranks: Pool) -> None:
    first, second = ranks.run(log_of, 2, ("pp=2 stages=measured",), timeout_s=60)
    assert first == second
    assert "begin with the start, block 2" in first[0]
    assert "ms that one microbatch takes" in first[0]


def refuse(world: Any) -> None:
    paceline.Trainer(
        Outside,
        forward=call,
        loss=reduce,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout="pp=2 dp_replicate=2 ep=2 stages=measured",
        example={"x": torch.zeros(2, 5, 4)},
    )


def test_shared_experts_are_not_timed(ranks: Pool) -> None:
    with pytest.raises(RankError, match="PL494"):
        ranks.run(refuse, 4)


@pytest.mark.slow
def test_parts_of_blocks_are_timed_by_all_ranks_of_tp(ranks: Pool) -> None:
    cases: list[Any] = [("pp=2 tp=2 stages=measured", HEADS)]
    [(_, losses, norms)] = ranks.run(train_layouts, 1, ([("", HEADS)],))[0]
    [found] = ranks.run(train_layouts, 4, (cases,), timeout_s=100)[0]
    assert found[1] == pytest.approx(losses, rel=1e-12)
    assert found[2] == pytest.approx(norms, rel=1e-10)
