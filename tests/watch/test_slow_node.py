"""A node is slow for as long as other nodes wait for its ranks, not if only its own ranks wait."""

from __future__ import annotations

from paceline.watch.protocol.report import PlaceTime
from paceline.watch.reasoning.pace import BeatInterval, RankPace, Slow
from paceline.watch.reasoning.slow import SlowRanks
from paceline.watch.reasoning.slow_node import SlowTime
from tests.watch.situations import reader
from tests.watch.test_slow import BACK, LOADS, at, beat

OWN = {2, 3}


def slow(*waiting: int) -> list[Slow]:
    return [Slow(2, 0.05, waiting, 0.8, waiting, 10.0)]


def test_a_node_counts_as_slow_after_its_time_and_from_the_first_window_on() -> None:
    time = SlowTime(30.0)
    told = [now_s for now_s in range(100, 140, 2) if time.read(slow(0, 3), OWN, now_s)]
    assert told[0] == 120, "the window of the first reading counts"
    assert time.seconds(120.0) == 30.0


def test_a_rank_that_only_its_own_node_waits_for_makes_no_slow_node() -> None:
    time = SlowTime(10.0)
    assert not any(time.read(slow(3), OWN, now_s) for now_s in range(100, 140, 2))


def test_a_pause_ends_the_time_and_a_missed_reading_does_not() -> None:
    time = SlowTime(30.0)
    for now_s in range(100, 116, 2):
        assert not time.read([] if now_s == 108 else slow(0), OWN, now_s)
    for now_s in range(116, 126, 2):
        assert not time.read([], OWN, now_s)
    assert not time.read(slow(0), OWN, 126)
    assert time.seconds(126) == 10.0


def place(is_slow: bool) -> PlaceTime:
    return at(1, *LOADS) if is_slow else at(1, *BACK, waits=True)


def test_the_watch_reports_a_slow_node_with_its_evidence() -> None:
    told: list[tuple[tuple[int, ...], str]] = []
    watch = SlowRanks(reader(""), SlowTime(20.0), lambda ranks, evidence: told.append((ranks, evidence)))
    for second in range(1, 40):
        watch.book.note_beat(beat(1, second, place(is_slow=True)), float(second))
        interval = BeatInterval(second, 0.0, 1.0, 1.0, 50, ("0",), 5)
        watch.book.note_others([RankPace(0, ("0",), (interval,))], float(second), 0.0)
        watch.read(float(second))
    assert told
    ranks, evidence = told[0]
    assert ranks == (1,)
    assert evidence.startswith("for 2")
    assert " s, rank 1 makes rank 0 wait: it has waited in collectives for 100% of the last 10 s" in evidence
    assert "in the data loader" in evidence
