"""The plan of writers: every part once, by a rank that has it, and about as much on each rank."""

from __future__ import annotations

import random

from paceline.checkpoint.part import Part
from paceline.checkpoint.writers import Holding, digest_holdings, plan_writers


def hold(name: str, size: int, *ranks: int) -> Holding:
    return Holding(name, Part.all_of((size,)), size, ranks)


def written(holdings: list[Holding], num_ranks: int) -> list[int]:
    writers = plan_writers(holdings)
    assert all(writer in holding.ranks for writer, holding in zip(writers, holdings, strict=True))
    pairs = list(zip(writers, holdings, strict=True))
    return [
        sum(holding.num_bytes for writer, holding in pairs if writer == rank) for rank in range(num_ranks)
    ]


def test_copies_are_spread_so_that_ranks_differ_by_at_most_one_tensor() -> None:
    draw = random.Random(0)
    for num_ranks in (1, 2, 3, 8):
        for _ in range(20):
            holdings = [hold(f"w{n}", draw.randint(0, 1000), *range(num_ranks)) for n in range(30)]
            loads = written(holdings, num_ranks)
            assert max(loads) - min(loads) <= max(holding.num_bytes for holding in holdings)


def test_what_one_rank_has_counts_before_copies_are_spread() -> None:
    holdings = [hold("own", 100, 1), *(hold(f"w{n}", 20, 0, 1) for n in range(7))]
    assert written(holdings, 2) == [120, 120]


def test_the_plan_follows_from_its_arguments_alone() -> None:
    holdings = [hold("a", 5, 0, 1), hold("b", 5, 0, 1), hold("c", 5, 0, 1)]
    assert plan_writers(holdings) == plan_writers(list(holdings)) == [0, 1, 0]
    assert digest_holdings(holdings) == digest_holdings([*holdings])
    assert digest_holdings(holdings) != digest_holdings(holdings[:2])
    assert digest_holdings(holdings) != digest_holdings([*holdings[:2], hold("c", 5, 0)])
