"""The bubble of a step: how long each rank of a pipeline waited, the same on all ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.bubble import find_bubble
from tests.dist.pool import Pool
from tests.train.test_pipeline import Series, build

CPU = torch.device("cpu")


def times(busy_s: list[float], lasted_s: list[float]) -> Any:
    return SimpleNamespace(busy_s=busy_s, lasted_s=lasted_s)


def ranks_of(pp: int) -> Any:
    return SimpleNamespace(pp=SimpleNamespace(size=pp))


def test_waits_are_shares_of_the_slowest_ranks_time() -> None:
    agreed = times([3.0, 5.0, 10.0, 10.0], [9.0, 9.5, 10.0, 10.0])
    assert find_bubble(agreed, ranks_of(2), CPU) == pytest.approx([0.6, 0.0])
    assert find_bubble(agreed, ranks_of(4), CPU) == pytest.approx([0.7, 0.5, 0.0, 0.0])


def test_there_is_none_without_pp_on_cuda_and_without_microbatches() -> None:
    agreed = times([3.0, 5.0], [9.0, 9.5])
    assert find_bubble(agreed, ranks_of(1), CPU) is None
    assert find_bubble(agreed, ranks_of(2), torch.device("cuda")) is None
    assert find_bubble(times([0.0, 0.0], [0.0, 0.0]), ranks_of(2), CPU) is None


class Slow(nn.Module):
    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.inner, self._delay_s = nn.Linear(8, 8), delay_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._delay_s)
        done: Tensor = self.inner(x)
        return done


class SlowFirst(nn.Module):
    """The block of the first stage takes 150 ms longer than that of the second: longer than a busy machine
    keeps a rank waiting for a core."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Slow(0.15), Slow(0.0)])
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        done: Tensor = self.leave(x)
        return done


def measure_bubble(world: Any, layout: str) -> list[Any]:
    trainer = build(layout, SlowFirst)
    found = [trainer.step(share).bubble for share in trainer.loader(Series(), global_batch_size=11)]
    trainer.close()
    return found


def test_the_rank_that_waits_is_seen_on_all_ranks(ranks: Pool) -> None:
    first, *others = ranks.run(measure_bubble, 2, ("pp=2",))
    assert others == [first]
    assert len(first) == 2
    for shares in first:
        assert all(0 <= share <= 1 for share in shares)
        assert shares[1] > shares[0], "the second stage waits for the first"
    assert ranks.run(measure_bubble, 1, ("",))[0] == [None, None]
