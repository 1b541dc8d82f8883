from __future__ import annotations

import random

import pytest

from paceline.bench.spread import Spread


def test_few_values_give_the_whole_range_and_state_what_it_is_worth() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 0.0, 1)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 0.75, 3)
    five = Spread.of(range(5))
    assert (five.low, five.high) == (0, 4)
    assert five.confidence == pytest.approx(1 - 2 / 32)


def test_ends_are_those_of_the_tables() -> None:
    # Conover, "Practical Nonparametric Statistics": n=10 gives the 2nd and 9th, n=20 the 6th and 15th.
    ten, twenty = Spread.of(range(1, 11)), Spread.of(range(1, 21))
    assert (ten.low, ten.high) == (2, 9)
    assert ten.confidence == pytest.approx(0.9785, abs=1e-4)
    assert (twenty.low, twenty.high) == (6, 15)
    assert twenty.confidence == pytest.approx(0.9586, abs=1e-4)


def test_interval_covers_the_true_median_as_often_as_it_states() -> None:
    generator = random.Random(0)
    spreads = [Spread.of(generator.lognormvariate(0, 1) for _ in range(25)) for _ in range(2000)]
    covered = sum(spread.low <= 1.0 <= spread.high for spread in spreads) / len(spreads)
    assert covered == pytest.approx(spreads[0].confidence, abs=0.015)
    assert spreads[0].confidence >= 0.95


def test_formats_median_and_interval() -> None:
    assert f"{Spread.of([1.0, 2.0, 4.0]):.1f}" == "2.0 (1.0..4.0)"
    assert f"{Spread.of([2.0]):.1f}" == "2.0"


def test_takes_thousands_of_values() -> None:
    # Of 2**n ways there are more than a float can count from n = 1024 on.
    many = Spread.of(range(1600))
    assert many.confidence >= 0.95
    # Half of the values, give or take 1.96 of their standard deviation.
    assert many.low == pytest.approx(800 - 1.96 * 20, abs=2)
    assert many.high == pytest.approx(799 + 1.96 * 20, abs=2)
