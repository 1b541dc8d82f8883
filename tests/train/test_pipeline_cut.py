"""The cut of a model: by counted operations, as evenly as any cut can be."""

from __future__ import annotations

import math
import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.blocks import find_blocks
from paceline.parallel.stages.record import record_forward
from paceline.pipeline.even_cut import find_starts
from tests.dist.pool import Pool
from tests.train.test_pipeline import build

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
            starts = find_starts(tuple(costs), num_stages)
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
    starts = find_starts(tuple(record.costs), num_stages)
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
    found, even = (ranks.run(compute_steps, 2, (layout, 4)) for layout in ("pp=2", "pp=2 stages=blocks.4"))
    assert max(found) <= 0.85 * max(even), (found, even)
