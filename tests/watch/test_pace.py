"""The rank that makes the others wait, from made-up shares of waiting over windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.protocol.report import Beat, Pace, PlaceTime
from paceline.watch.protocol.wire import from_json, to_json
from paceline.watch.reasoning.pace import PaceBook, Slow

Share = Callable[[int, int], float]
"""Of rank and second: the share of the second that it waits."""


def make_beat(
    rank: int,
    second: int,
    share: float,
    *,
    seconds: float = 1.0,
    rate: float = 10,
    groups: tuple[str, ...] = ("0",),
    samples: int = 5,
) -> Beat:
    places = (PlaceTime(seconds * share, True, ()), PlaceTime(seconds * (1 - share), False, ()))
    count = int(rate * second)
    issued = dict.fromkeys(groups, count + (share > 0.5))
    completed = dict.fromkeys(groups, count)
    return Beat(rank, float(second), "running", issued, completed, 0, False, pace=Pace(samples, places))


def find(
    num_ranks: int, seconds: int, share: Share, *, rate: float = 10, samples: int = 5
) -> tuple[int, list[Slow]]:
    """Return after how many seconds a rank is found slow, and which."""
    book = PaceBook()
    for second in range(1, seconds + 1):
        for rank in range(num_ranks):
            beat = make_beat(rank, second, share(rank, second), rate=rate, samples=samples)
            book.note_beat(beat, float(second))
        if found := book.find_slow(float(second)):
            return second, found
    return seconds, []


def test_one_that_hardly_waits_is_found_in_ten_seconds() -> None:
    second, (slow,) = find(4, 60, lambda rank, _: 0.05 if rank == 2 else 0.7)
    assert second <= 10
    assert (slow.rank, slow.waiting, slow.peers, slow.window_s) == (2, (0, 1, 3), (0, 1, 3), 10.0)
    assert slow.share == pytest.approx(0.05)
    assert slow.waiting_share == pytest.approx(0.7)


def test_a_small_difference_takes_longer() -> None:
    second, (slow,) = find(2, 200, lambda rank, _: 0.05 if rank else 0.35)
    assert 20 < second <= 40
    assert (slow.rank, slow.window_s) == (1, 40.0)


def test_fewer_samples_take_longer() -> None:
    second, (slow,) = find(4, 60, lambda rank, _: 0.05 if rank == 2 else 0.8, samples=2)
    assert 10 < second <= 20
    assert (slow.rank, slow.window_s) == (2, 20.0)
    second, (slow,) = find(2, 200, lambda rank, _: 0.05 if rank else 0.35, samples=2)
    assert 40 < second <= 160


@pytest.mark.parametrize(("own", "others"), [(0.05, 0.23), (0.6, 0.85), (0.5, 0.5), (0.9, 0.9), (0.0, 0.0)])
def test_less_than_a_fifth_or_a_half_is_not_slow(own: float, others: float) -> None:
    assert not find(3, 400, lambda rank, _: own if rank == 1 else others)[1]


def test_ranks_that_are_slow_in_turns_are_not_named() -> None:
    assert not find(2, 400, lambda rank, second: 0.0 if second // 4 % 2 == rank else 0.8)[1]
    # After a while of this, ten seconds of chance are no news either.
    assert not find(2, 170, lambda rank, second: 0.4 if second < 158 else 0.8 * rank)[1]


@pytest.mark.parametrize("samples", [2, 5])
def test_chance_names_nobody(samples: int) -> None:
    draw = random.Random(3)

    def look(share: float) -> float:
        return sum(draw.random() < share for _ in range(samples)) / samples

    for share in (0.2, 0.5, 0.8):
        assert not find(3, 1500, lambda *_: look(share), samples=samples)[1]  # noqa: B023


def test_one_pause_is_not_named_and_a_very_long_one_is() -> None:
    def pause(begin: int, end: int) -> Share:
        return lambda rank, second: float(rank != 0) if begin <= second < end else 0.1

    assert not find(3, 400, pause(50, 80), rate=0)[1]
    second, (slow,) = find(3, 400, pause(50, 400), rate=0)
    assert (slow.rank, slow.window_s) == (0, 160.0)
    assert second > 100


def test_steps_of_many_seconds_take_the_longest_window() -> None:
    # One in ten seconds: chance may have given one rank the longer samples.
    second, found = find(2, 400, lambda rank, _: 0.0 if rank else 0.6, rate=0.1)
    assert second > 100
    assert found[0].window_s == 160.0


def test_workers_of_a_server_are_not_slow() -> None:
    assert not find(4, 300, lambda rank, _: 0.95 if rank == 0 else 0.05)[1]
    assert not find(3, 300, lambda rank, _: 0.95 if rank == 0 else 0.05)[1]


def test_two_of_five_are_both_found() -> None:
    _, found = find(5, 60, lambda rank, _: 0.0 if rank in (1, 4) else 0.8)
    assert [(slow.rank, slow.waiting) for slow in found] == [(1, (0, 2, 3)), (4, (0, 2, 3))]


def test_only_ranks_that_share_a_group_wait_for_each_other() -> None:
    book = PaceBook()
    for second in range(1, 100):
        for rank in range(4):
            groups = ("a",) if rank < 2 else ("b",)
            share = 0.8 if rank < 2 else 0.1
            book.note_beat(make_beat(rank, second, share, groups=groups), float(second))
        assert not book.find_slow(float(second))


def test_a_rank_that_reports_nothing_is_not_judged() -> None:
    book = PaceBook()
    for second in range(1, 40):
        book.note_beat(make_beat(0, second, 0.9), float(second))
        book.note_beat(make_beat(2, second, 0.9), float(second))
        if second < 6:
            book.note_beat(make_beat(1, second, 0.0), float(second))
        assert not book.find_slow(float(second))


def test_seldom_samples_stand_for_all_of_their_time() -> None:
    """A rank that holds Python's lock for three seconds of four is looked at after these."""
    book = PaceBook()
    found: list[Slow] = []
    for second in range(1, 120):
        book.note_beat(make_beat(0, second, 0.75), float(second))
        if second % 4 == 3:
            book.note_beat(make_beat(1, second, 0.0, seconds=3.0), float(second))
        if second % 4 == 0:
            book.note_beat(make_beat(1, second, 0.4), float(second))
        found = found or book.find_slow(float(second))
    assert found[0].rank == 1
    assert found[0].share == pytest.approx(0.1, abs=0.05)


def test_nodes_report_each_other_and_name_their_own() -> None:
    books = PaceBook(), PaceBook()
    found: list[Slow] = []
    for second in range(1, 40):
        for rank in range(4):
            share = 0.0 if rank == 3 else 0.8
            books[rank // 2].note_beat(make_beat(rank, second, share), float(second))
        if second % 3 == 0:  # by the store, seldom, and with clocks of their own
            for here, there in ((0, 1), (1, 0)):
                stillness = Stillness(0.0, 0.0, has_waiting=False)
                state = NodeState("n", (), stillness, paces=books[there].list_paces(float(second)))
                heard = from_json(NodeState, to_json(state))
                books[here].note_others(heard.paces, second + 0.5, 0.5)
        assert not books[0].find_slow(second - 4.0)
        found = found or books[1].find_slow(second - 4.0)
    assert [(slow.rank, slow.waiting) for slow in found] == [(3, (0, 1, 2))]


def test_what_nodes_report_stays_small() -> None:
    book = PaceBook()
    for second in range(1, 200):
        for rank in range(8):
            book.note_beat(make_beat(rank, second, 0.3, groups=("0", "1", "12")), float(second))
    state = NodeState("n", (), Stillness(0.0, 0.0, has_waiting=False), paces=book.list_paces(199.0))
    assert len(to_json(state)) < 6000
