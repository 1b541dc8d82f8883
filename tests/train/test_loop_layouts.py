"""A loop of the user's own has the bits of `Trainer`, on any number of ranks and under every layout."""

from __future__ import annotations

import pytest

from tests.dist.pool import Pool
from tests.train.loops import run

KINDS = ["trainer", "plain", "explicit"]
LAYOUTS = [(2, "dp_replicate=2"), (2, "dp_shard=2 zero=2"), (3, "dp_shard=3"), (2, "tp=2")]
MORE = [
    (3, "dp_replicate=3"),
    (4, "dp_replicate=4"),
    (2, "dp_shard=2 zero=1"),
    (2, "dp_shard=2"),
    (4, "dp_shard=4"),
    (4, "dp_replicate=2 dp_shard=2"),
    (4, "dp_replicate=2 tp=2"),
    (4, "dp_shard=2 tp=2"),
]


def compare(ranks: Pool, nproc: int, layout: str, reduction: str = "exact") -> str:
    """Return the one hash of all kinds of loops."""
    found = {}
    for kind in KINDS:
        results = ranks.run(run, nproc, (kind, layout, reduction))
        assert len(set(map(str, results[1:]))) <= 1, (kind, results)  # losses; rank 0 alone has the weights
        found[kind] = results[0]
    assert len({hashed for hashed, _ in found.values()}) == 1, found
    assert found["trainer"][1] == found["explicit"][1]  # the losses
    return found["trainer"][0]


def test_loops_have_the_bits_of_trainer(ranks: Pool) -> None:
    expected = compare(ranks, 1, "")
    for nproc, layout in LAYOUTS:
        found = compare(ranks, nproc, layout)
        assert found == expected or "tp" in layout, layout


@pytest.mark.slow
def test_loops_have_the_bits_of_trainer_under_more_layouts(ranks: Pool) -> None:
    expected = compare(ranks, 1, "")
    split = compare(ranks, 2, "tp=2")
    for nproc, layout in MORE:
        assert compare(ranks, nproc, layout) == (split if "tp" in layout else expected), layout


def test_fast_reduction_has_the_bits_of_trainer(ranks: Pool) -> None:
    for nproc, layout in [(1, ""), (3, "dp_replicate=3"), (2, "dp_shard=2")]:
        compare(ranks, nproc, layout, "fast")


def test_weights_that_are_no_powers_of_two(ranks: Pool) -> None:
    """A step's backward has the bits of `Trainer`; a plain one has the same bits on any number of ranks."""
    args = ("", "exact", 5)
    assert ranks.run(run, 1, ("explicit", *args)) == ranks.run(run, 1, ("trainer", *args))
    plain = ranks.run(run, 1, ("plain", *args))[0][0]
    for nproc, layout in [(2, "dp_replicate=2"), (2, "dp_shard=2")]:
        assert ranks.run(run, nproc, ("plain", layout, "exact", 5))[0][0] == plain, layout
