"""Schedules: every order is a whole step that ends, and waits as long as its formula says."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from paceline.errors import PacelineError
from paceline.pipeline.messages import Message, list_needs, list_results, list_taken
from paceline.pipeline.orders import NAMES, make_schedule
from paceline.pipeline.picture import draw_text
from paceline.pipeline.schedule import Action, Schedule
from paceline.pipeline.simulate import Costs, Simulation, simulate
from paceline.recipe.layout import LOOPING

SIZES = [(ranks, count) for ranks in (2, 4, 8) for count in (4, 8, 16, 32)]


def idle(result: Simulation) -> Fraction:
    """Exactly the idle share; times are whole numbers."""
    return 1 - Fraction(int(result.busy), int(result.total) * len(result.spans))


def check_schedule(schedule: Schedule) -> None:
    """Every stage runs each microbatch once forward and once backward, and no ranks wait for each other."""
    done: Counter[tuple[str, int, int]] = Counter()
    for own in schedule.actions:
        for action in own:
            for kind in {"B": "IW"}.get(action.kind, action.kind):
                done[kind, action.stage, action.microbatch] += 1
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    assert done == {(kind, stage, m): 1 for kind in "FIW" for stage in stages for m in microbatches}
    assert not simulate(schedule).stuck


@pytest.mark.parametrize("name", NAMES)
def test_every_order_is_a_step_that_ends(name: str) -> None:
    for ranks in (1, 2, 3, 4, 6):
        for count in (1, 2, 3, 5, 6, 12, 13):
            for chunks in (2, 3) if name in LOOPING else (None,):
                check_schedule(make_schedule(name, ranks, count, chunks))


@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_bubbles_are_those_of_the_formulas(ranks: int, count: int) -> None:
    for name in ("gpipe", "1f1b"):
        result = simulate(make_schedule(name, ranks, count))
        assert idle(result) == Fraction(ranks - 1, count + ranks - 1)
        waiting = int(result.total) * ranks - int(result.busy)
        assert Fraction(waiting, int(result.busy)) == Fraction(ranks - 1, count)
        assert result.idle_over_busy == pytest.approx((ranks - 1) / count)
    if count % ranks:
        return  # the formula is that of whole groups of microbatches
    for name in LOOPING:
        for chunks in (2, 4):
            result = simulate(make_schedule(name, ranks, count, chunks))
            assert idle(result) == Fraction(ranks - 1, chunks * count + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_microbatch_keeps_one_rank_busy_at_a_time(ranks: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert idle(simulate(make_schedule(name, ranks, 1))) == Fraction(ranks - 1, ranks)


@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_divided_backwards_wait_less_than_1f1b_and_keep_no_more(ranks: int, count: int) -> None:
    plain = simulate(make_schedule("1f1b", ranks, count))
    for name, stages in (("zero_bubble", 1), ("zbv", 2)):
        result = simulate(make_schedule(name, ranks, count), Costs(activations=1 / stages))
        assert idle(result) < idle(plain)
        assert max(result.most_kept) <= min(ranks, count)


def test_1f1b_keeps_as_many_microbatches_as_ranks() -> None:
    for count in (8, 32):
        assert simulate(make_schedule("1f1b", 4, count)).most_kept == (4, 3, 2, 1)
    assert simulate(make_schedule("gpipe", 4, 32)).most_kept == (32, 32, 32, 32)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_counts_as_taken_once_its_receiver_has_answered(name: str) -> None:
    schedule = make_schedule(name, 4, 8, 2 if name in LOOPING else None)
    for rank, own in enumerate(schedule.actions):
        taken = list_taken(schedule, rank, ())
        named = [message for messages in taken.values() for message in messages]
        sent = [message for action in own for message in list_results(action, schedule.num_stages, {})]
        assert len(named) == len(set(named))
        assert set(named) <= {message for message in sent if schedule.homes[message.target] != rank}
        for answer, messages in taken.items():
            order = [m for each in schedule.actions[schedule.homes[answer.source]] for m in _uses(each)]
            assert all(order.index(message) < order.index(answer) for message in messages)


def _uses(action: Action) -> list[Message]:
    """Return the inputs and outputs of an action, for eight stages or fewer."""
    return [*list_needs(action, 8, {}), *list_results(action, 8, {})]


def test_costs_differ_by_stage_and_messages_take_time() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    # Rank 1 waits 1 + 5 for the first activation; its work is 2 x 3 + 2 x (4 + 4).
    result = simulate(schedule, Costs((1, 3), (1, 4), (1, 4), message=5))
    assert result.spans[1][0].start == 6
    assert result.spans[1][-1].end == 6 + 6 + 16
    assert result.total == 6 + 6 + 16 + 5 + 2


@pytest.mark.parametrize(
    ("name", "count", "chunks", "code", "seen"),
    [
        ("1f1", 4, None, "PL474", "schedule='1f1'"),
        ("interleaved", 4, 1, "PL475", "chunks=1"),
        ("1f1b", 4, 2, "PL475", "chunks=2"),
        ("zbv", 4, 3, "PL475", "chunks=3"),
    ],
)
def test_numbers_that_an_order_does_not_take(
    name: str, count: int, chunks: int | None, code: str, seen: str
) -> None:
    with pytest.raises(PacelineError, match=seen) as caught:
        make_schedule(name, 4, count, chunks)
    assert caught.value.code == code


def test_pictures_show_every_action() -> None:
    schedule: Schedule = make_schedule("zbv", 2, 4)
    result = simulate(schedule)
    lines = draw_text(schedule, result, 500).splitlines()
    assert [line[:6] for line in lines[:2]] == ["rank 0", "rank 1"]
    assert lines[0].split()[2] == "A0"
    assert sum(line.count("'") for line in lines[:2]) == 4 * 4
    assert lines[1][8:].startswith("...B0")
    assert max(map(len, draw_text(schedule, result, 40).splitlines()[:2])) == 40
