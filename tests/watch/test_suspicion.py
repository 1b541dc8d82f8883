"""When launchers ask their ranks what they have called, and what comes of it; clocks are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.launcher.suspicion import Suspicion
from paceline.watch.protocol.report import Call, Group, Report, Seen, Verdict
from paceline.watch.protocol.wire import from_json, to_json
from tests.watch.situations import NOW_S, call

_WORKS = Stillness(0.0, 0.0, has_waiting=False)
_PER_S = 400


class Node:
    """A node with one rank, which issues 400 calls a second from `NOW_S` on, each tenth with `op`."""

    def __init__(self, rank: int, op: str) -> None:
        self.rank, self.op = rank, op
        self.suspicion = Suspicion()
        self.asked_s: list[float] = []
        self.number = 0
        self.verdict: Verdict | None = None

    def issue(self, numbers: range) -> list[Call]:
        made = [call(n, op=self.op if n % 10 == 0 else "sum", done=True) for n in numbers]
        return [replace(c, began_s=NOW_S + c.number / _PER_S) for c in made]

    def beat(self, now_s: float) -> None:
        last = int((now_s - NOW_S) * _PER_S)
        self.suspicion.note_calls(self.rank, self.issue(range(max(self.number + 1, last - 255), last + 1)))
        self.number = last

    def report(self, now_s: float) -> Seen:
        self.asked_s.append(now_s)
        last = int((now_s - NOW_S) * _PER_S)
        calls = tuple(self.issue(range(max(1, last - 999), last + 1)))
        groups = {"0": Group("0", "world", (0, 1))}
        return Seen(2, {}, {self.rank: Report(self.rank, now_s, "running", groups, calls, ())})

    def judge(self, others: Sequence[NodeState], now_s: float) -> None:
        seen = {n: (state, 0.0) for n, state in enumerate(others, 1)}
        found = self.suspicion.judge(seen, now_s, lambda: self.report(now_s), lambda _: [])
        self.verdict = self.verdict or found

    @property
    def state(self) -> NodeState:
        state = NodeState("node", (self.rank,), _WORKS, None, None, *self.suspicion.state)
        return from_json(NodeState, to_json(state))


def run(here: Node, there: Node, seconds: float, *, skew_s: float = 0.0, delay_s: float = 4.0) -> None:
    """Both nodes judge four times a second, and hear of each other what was so some seconds ago."""
    past: list[tuple[NodeState, NodeState]] = []
    for tick in range(int(seconds * 4)):
        now_s = NOW_S + 1.0 + tick / 4
        if tick % 8 == 0:
            here.beat(now_s)
            there.beat(now_s + skew_s)
            past.append((here.state, there.state))
        heard = past[max(0, len(past) - 1 - int(delay_s / 2))]
        here.judge([heard[1]], now_s)
        there.judge([heard[0]], now_s)


def test_nodes_ask_at_one_instant_and_agree() -> None:
    here, there = Node(0, "sum"), Node(1, "max")
    run(here, there, 30.0, skew_s=0.3)
    assert here.asked_s[0] == there.asked_s[0]
    for node in (here, there):
        assert node.verdict is not None
        assert node.verdict.code == "PL805"
        assert "rank 1 gives max" in node.verdict.headline


def test_nodes_whose_calls_fit_ask_nobody() -> None:
    here, there = Node(0, "max"), Node(1, "max")
    run(here, there, 30.0, skew_s=0.3)
    assert (here.asked_s, there.asked_s, here.verdict, there.verdict) == ([], [], None, None)


def test_a_node_without_a_suspicion_asks_with_the_others() -> None:
    here = Node(0, "sum")
    asks_at_s = NOW_S + 5.0
    asked = NodeState("node", (1,), _WORKS, asks_at_s=asks_at_s)
    for tick in range(80):
        here.judge([asked], NOW_S + tick / 4)
    assert here.asked_s == [asks_at_s]
    assert here.state.asks_at_s == 0.0  # nothing came of it


def test_one_node_asks_at_once() -> None:
    node = Node(0, "sum")
    node.beat(NOW_S + 2.0)
    other = Node(1, "max")
    node.suspicion.note_calls(1, other.issue(range(600, 620)))
    node.judge([], NOW_S + 2.25)
    assert node.asked_s == [NOW_S + 2.25]
    assert node.verdict is None  # the other rank has not answered
    node.beat(NOW_S + 3.0)
    node.suspicion.note_calls(1, other.issue(range(1000, 1020)))
    node.judge([], NOW_S + 3.0)
    assert len(node.asked_s) == 1  # not again so soon
