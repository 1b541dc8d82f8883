"""When a job counts as stuck: what is slow has time, what waits for nothing has not."""

from __future__ import annotations

from typing import Any

from paceline.watch.launcher.clock import PATIENCE, STALL_S, Clock
from paceline.watch.protocol.report import Beat, Process

HANG_S = 10.0


def beat(rank: int, issued: int, completed: int, place: int = 1, phase: Any = "running") -> Beat:
    return Beat(rank, 0.0, phase, {"0": issued}, {"0": completed}, place, phase == "joining")


def process(rank: int, cpu_share: float, io_rate: float = 0.0, state: Any = "sleeping") -> Process:
    return Process(rank, "here", 1, state, cpu_share=cpu_share, io_rate=io_rate)


def let_pass(clock: Clock, seconds: int, beats: list[Beat], shares: dict[int, float], start: int = 0) -> None:
    for second in range(start, start + seconds):
        for each in beats:
            clock.note_beat(each, float(second))
        seen = {rank: process(rank, share) for rank, share in shares.items()}
        clock.note_processes(seen, second - 1.0, float(second))


def test_ranks_that_wait_for_an_idle_one_are_stuck() -> None:
    clock, beats, shares = Clock(0.0), [beat(0, 5, 4), beat(1, 4, 4)], {0: 0.01, 1: 0.0}
    let_pass(clock, 10, beats, shares)
    assert clock.read(STALL_S).is_stalled
    assert not clock.read(9.9).is_stuck(HANG_S)
    let_pass(clock, 1, beats, shares, start=10)
    assert clock.read(10.0).is_stuck(HANG_S)


def test_stillness_must_have_been_seen() -> None:
    clock = Clock(0.0)
    let_pass(clock, 5, [beat(0, 5, 4), beat(1, 4, 4)], {1: 0.0})
    assert not clock.read(60.0).is_stuck(HANG_S), (
        "the launcher was stopped meanwhile, and perhaps the ranks too"
    )
    clock.note_processes({1: process(1, 0.15)}, 4.0, 60.0)
    assert clock.read(60.0).still_s == 0.0
    clock.note_processes({1: process(1, 0.0)}, 60.0, 71.0)
    assert clock.read(71.0).is_stuck(HANG_S)


def test_what_was_used_before_a_collective_is_no_sign_of_work_after_it() -> None:
    clock, beats = Clock(0.0), [beat(0, 5, 4), beat(1, 4, 4)]
    let_pass(clock, 1, beats, {})
    clock.note_processes({1: process(1, 0.9)}, -3.0, 2.0)
    clock.note_processes({1: process(1, 0.0)}, 2.0, 3.0)
    assert clock.read(3.0).still_s == 3.0


def test_a_rank_that_computes_has_more_time() -> None:
    clock = Clock(0.0)
    let_pass(clock, 101, [beat(0, 5, 4), beat(1, 4, 4)], {0: 0.01, 1: 0.9})
    assert not clock.read(PATIENCE * HANG_S - 0.1).is_stuck(HANG_S)
    assert clock.read(PATIENCE * HANG_S).is_stuck(HANG_S)


def test_a_rank_that_spins_while_it_waits_does_not_compute() -> None:
    clock = Clock(0.0)
    let_pass(clock, 12, [beat(0, 5, 4), beat(1, 4, 4)], {0: 1.0, 1: 0.0})
    assert clock.read(11.0).is_stuck(HANG_S)


def test_another_line_or_another_collective_is_a_sign_of_work() -> None:
    clock = Clock(0.0)
    let_pass(clock, 9, [beat(0, 5, 4), beat(1, 4, 4, place=1)], {})
    let_pass(clock, 10, [beat(1, 4, 4, place=2)], {}, start=9)
    assert not clock.read(18.9).is_stuck(HANG_S)
    let_pass(clock, 1, [beat(1, 4, 4, place=2)], {}, start=19)
    assert clock.read(19.0).is_stuck(HANG_S)
    let_pass(clock, 1, [beat(1, 5, 4, place=2)], {}, start=19)
    assert not clock.read(20.9).is_stalled
    assert clock.read(20.0).uncollected_s == 1.0


def test_where_nobody_waits_for_anybody_there_is_more_time() -> None:
    clock, beats = Clock(0.0), [beat(0, 4, 4), beat(1, 4, 4)]
    let_pass(clock, 100, beats, {})
    assert not clock.read(50.0).is_stalled
    assert not clock.read(99.9).is_stuck(HANG_S)
    let_pass(clock, 1, beats, {}, start=100)
    assert clock.read(100.0).is_stuck(HANG_S)


def test_a_job_that_computes_without_collectives_is_never_stuck() -> None:
    clock = Clock(0.0)
    let_pass(clock, 500, [beat(0, 0, 0)], {0: 0.9})
    assert not clock.read(499.0).is_stuck(HANG_S)


def test_ranks_that_wait_to_join_wait() -> None:
    clock = Clock(0.0)
    let_pass(clock, 12, [beat(0, 0, 0, phase="joining")], {})
    assert clock.read(11.0).is_stuck(HANG_S)
    clock.note_change(11.0)
    assert not clock.read(12.0).is_stuck(HANG_S)


def test_a_checkpoint_on_its_way_to_a_slow_disk_is_work() -> None:
    for saving in (process(1, 0.0, io_rate=50_000.0), process(1, 0.0, state="uninterruptible")):
        clock = Clock(0.0)
        let_pass(clock, 1, [beat(0, 5, 4), beat(1, 4, 4)], {})
        for second in range(40):
            clock.note_processes({0: process(0, 0.0), 1: saving}, second - 1.0, float(second))
        assert not clock.read(40.0).is_stuck(HANG_S)
        assert clock.read(100.0).is_stuck(HANG_S)


def test_a_sleeping_rank_whose_threads_are_silent_is_stuck() -> None:
    """It holds Python's lock, such as in a process that cannot end; one that is stopped may go on."""
    for state, is_stuck in (("sleeping", True), ("stopped", False)):
        clock = Clock(0.0)
        let_pass(clock, 3, [beat(0, 4, 4), beat(1, 4, 4)], {1: 0.0})
        for second in range(3, 14):
            clock.note_processes({1: process(1, 0.0, state=state)}, second - 1.0, float(second))
        assert clock.read(13.0).is_stuck(HANG_S) is is_stuck
    clock = Clock(0.0)
    let_pass(clock, 14, [beat(0, 4, 4), beat(1, 4, 4)], {1: 0.0})
    assert not clock.read(13.0).is_stuck(HANG_S), "it beats: it may wait for something outside"
