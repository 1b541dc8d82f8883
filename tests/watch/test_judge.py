"""The judge of the table: what is right passes, and each thing that is wrong is found."""

from __future__ import annotations

import pytest

from tests.watch.cases import FAULTY, HEALTHY, Case
from tests.watch.judge import find_faults, find_said, read_ranks

CASE = next(case for case in FAULTY if case.script == "asleep")
CRASH = next(case for case in FAULTY if case.script == "backward_error")
HEALTHY_CASE = next(case for case in HEALTHY if case.script == "no_group")
WAITS, CAUSE = CASE.find_lines("WAITS")[0], CASE.find_lines("CAUSE")[0]
RIGHT = f"""step 3
paceline: rank 0 never reached all_reduce number 4 of world, where rank 1 has waited 4 s [PL800]
  rank 1 waits in all_reduce number 4 of world (float32 [8], sum)
      at asleep.py:{WAITS} in main: dist.all_reduce(x)
  rank 0 is asleep in time.sleep
      at asleep.py:{CAUSE} in ask_server: time.sleep(1)
  A collective completes only when every rank of its group has called it.
"""


def test_a_right_verdict_passes() -> None:
    assert find_faults(CASE, RIGHT, 1) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[PL800]", "[PL801]", "PL800 was not said"),
        ("paceline: ", "", "PL800 was not said"),
        ("all_reduce", "broadcast", "all_reduce is not named"),
        (f"asleep.py:{WAITS} ", "asleep.py:1 ", "no line of WAITS"),
        (f"asleep.py:{CAUSE} ", f"asleep.py:{CAUSE}0 ", "no line of CAUSE"),
        ("rank 1 waits", "rank 2 waits", "WAITS: rank 1 is not told"),
        ("rank 0 is", "rank 2 is", "CAUSE: rank 0 is not told"),
        ("ask_server", "wait", "nothing matches 'ask_server'"),
    ],
)
def test_a_wrong_one_is_found(old: str, new: str, fault: str) -> None:
    assert any(fault in found for found in find_faults(CASE, RIGHT.replace(old, new), 1))


def test_the_exit_code_counts() -> None:
    assert find_faults(CASE, RIGHT, 0) == ["the exit code is 0"]


def test_a_crash_names_rank_and_line() -> None:
    line = CRASH.find_lines("CAUSE")[0]
    text = f"paceline: rank 1 failed first, at {CRASH.script}.py:{line} in f: ZeroDivisionError: x [PL330]\n"
    assert find_faults(CRASH, text, 1) == []
    assert find_faults(CRASH, text.replace("rank 1", "rank 0"), 1)


def test_a_false_alarm_is_found() -> None:
    assert find_faults(HEALTHY_CASE, "done\n", 0) == []
    assert find_faults(HEALTHY_CASE, RIGHT, 0)
    assert find_faults(HEALTHY_CASE, "done\n", 1) == ["the exit code is 1"]


def test_a_slow_rank_may_be_reported_of_some_healthy_ones() -> None:
    text = "paceline: rank 1 makes the others wait [PL820]\n"
    assert find_faults(HEALTHY_CASE, text, 0)
    allowed: Case = next(case for case in HEALTHY if case.may_say)
    assert find_faults(allowed, text, 0) == []


def test_messages_are_taken_apart() -> None:
    first, second = find_said(f"a\npaceline: slow [PL820]\n  more\nb\n{RIGHT}The ranks' output: logs/x\n")
    assert (first.code, first.text) == ("PL820", "paceline: slow [PL820]\n  more\nb\nstep 3\n")
    assert second.code == "PL800"
    assert "logs/x" not in second.text
    assert [ranks for ranks, _ in second.list_places()] == [{1}, {0}]


def test_ranks_are_read() -> None:
    assert read_ranks("0, 2-4 and 7") == {0, 2, 3, 4, 7}
