"""When launchers ask their ranks what they have called, and what comes of it; clocks are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.launcher.running_calls import RunningCalls
from paceline.watch.protocol.report import Group, Report, Verdict
from paceline.watch.protocol.wire import from_json, to_json
from tests.watch.situations import NOW_S, call

_WORKS = Stillness(0.0, 0.0, has_waiting=False)


class Node:
    """A node with one rank, which issues calls at some rate from `NOW_S` on, each tenth with `op`."""

    def __init__(self, rank: int, op: str, per_s: int = 400) -> None:
        self.rank, self.op, self.per_s = rank, op, per_s
        self.calls = RunningCalls(NOW_S)
        self.asked_s: list[float] = []
        self.verdict: Verdict | None = None

    def report(self, now_s: float) -> dict[int, Report]:
        self.asked_s.append(now_s)
        last = int((now_s - NOW_S) * self.per_s)
        numbers = range(max(1, last - 999), last + 1)
        made = [call(n, op=self.op if n % 10 == 0 else "sum", done=True) for n in numbers]
        issued = tuple(replace(c, began_s=NOW_S + c.number / self.per_s) for c in made)
        groups = {"0": Group("0", "world", (0, 1))}
        return {self.rank: Report(self.rank, now_s, "running", groups, issued, ())}

    def judge(self, others: Sequence[NodeState], now_s: float) -> None:
        seen = {n: (state, 0.0) for n, state in enumerate(others, 1)}
        found = self.calls.judge(seen, now_s, lambda: self.report(now_s), lambda _: [])
        self.verdict = self.verdict or found

    @property
    def state(self) -> NodeState:
        state = NodeState(
            "node", (self.rank,), _WORKS, asked_at_s=self.calls.asked_at_s, answers=self.calls.answers
        )
        return from_json(NodeState, to_json(state))


def run(here: Node, there: Node, seconds: float, *, skew_s: float = 0.0, delay_s: float = 4.0) -> None:
    """Both nodes judge four times a second, and hear of each other what was so some seconds ago."""
    past: list[tuple[NodeState, NodeState]] = []
    for tick in range(int(seconds * 4)):
        now_s = NOW_S + 1.0 + tick / 4
        if tick % 8 == 0:
            past.append((here.state, there.state))
        heard = past[max(0, len(past) - 1 - int(delay_s / 2))]
        here.judge([heard[1]], now_s)
        there.judge([heard[0]], now_s + skew_s)


def test_nodes_ask_at_one_instant_and_agree() -> None:
    here, there = Node(0, "sum"), Node(1, "max")
    run(here, there, 100.0, skew_s=0.3)
    assert [int(at) % 32 for at in here.asked_s[1:]] == [0] * len(here.asked_s[1:])
    assert [int(at) for at in here.asked_s] == [int(at) for at in there.asked_s]
    for node in (here, there):
        assert node.verdict is not None
        assert node.verdict.code == "PL805"
        assert "rank 1 gives max" in node.verdict.headline


def test_nodes_whose_calls_fit_report_nothing() -> None:
    here, there = Node(0, "max"), Node(1, "max")
    run(here, there, 110.0, skew_s=0.3)
    assert (here.verdict, there.verdict) == (None, None)
    assert here.state.answers == {}  # nothing of them is published any more


@pytest.mark.parametrize(("per_s", "every_s"), [(1, 2), (400, 32)])
def test_ranks_with_many_calls_are_asked_rarely(per_s: int, every_s: int) -> None:
    node = Node(0, "sum", per_s)
    for tick in range(400):
        node.judge([], NOW_S + tick / 4)
    late = [at for at in node.asked_s if at > NOW_S + 32]
    assert late == [NOW_S - NOW_S % every_s + every_s * n for n in range(99) if 32 < every_s * n < 100]


def test_one_node_judges_at_once() -> None:
    node, other = Node(0, "sum"), Node(1, "max")
    at_s = NOW_S + 2.25
    both = {**node.report(at_s), **other.report(at_s)}
    assert node.calls.judge({}, at_s, lambda: both, lambda _: []) is not None
