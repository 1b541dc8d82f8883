"""The formulas against algorithms that are run message by message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paceline.bench.links import Curve, Link, Links
from paceline.bench.predictions import ALGORITHMS, list_phases, predict
from paceline.plan.calls import BUS_FACTORS
from tests.bench import message_schedules as schedules
from tests.bench.message_schedules import Program, Wire, chunk, everyone, simulate

LENGTH = 12
FREE = Links(Link.of(0.0, 1e9), Link.of(0.0, 1e9))
PLACES = [
    (0, 0),
    (0, 1),
    (0, 1, 2),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 1, 2, 3, 4),
    (0, 0, 0, 1, 1, 1),
    (0, 0, 1, 1, 2, 2, 3, 3),
    (0, 1, 0, 1, 0, 1, 0, 1),
]


def start(n: int, kind: str) -> list[list[int | None]]:
    """Return every rank's numbers before: all of them, those of its chunk, or those of the root."""
    numbers = [[rank * 1000 + at for at in range(n * LENGTH)] for rank in range(n)]
    keeps = {
        "all": lambda rank, at: True,
        "chunk": lambda rank, at: at in chunk(rank, LENGTH),
        "root": lambda rank, at: rank == 0,
    }[kind]
    return [[v if keeps(rank, at) else None for at, v in enumerate(row)] for rank, row in enumerate(numbers)]


def total(n: int, at: int) -> int:
    return sum(rank * 1000 + at for rank in range(n))


def run_all_reduce(nodes: Sequence[int]) -> Wire:
    n = len(nodes)
    wire, chunks = Wire(start(n, "all")), [chunk(rank, LENGTH) for rank in range(n)]
    schedules.ring_reduce_scatter(wire, range(n), chunks)
    schedules.ring_all_gather(wire, range(n), chunks)
    assert wire.vectors == [[total(n, at) for at in range(n * LENGTH)]] * n
    return wire


def run_all_gather(nodes: Sequence[int]) -> Wire:
    n = len(nodes)
    wire, chunks = Wire(start(n, "chunk")), [chunk(rank, LENGTH) for rank in range(n)]
    schedules.ring_all_gather(wire, range(n), chunks)
    assert wire.vectors == [[at // LENGTH * 1000 + at for at in range(n * LENGTH)]] * n
    return wire


def run_broadcast(nodes: Sequence[int]) -> Wire:
    n = len(nodes)
    wire = Wire(start(n, "root"))
    schedules.tree(wire, n, LENGTH)
    assert wire.vectors == [list(range(n * LENGTH))] * n
    return wire


def run_reduce(nodes: Sequence[int]) -> Wire:
    n = len(nodes)
    wire, chunks = Wire(start(n, "all")), [chunk(rank, LENGTH) for rank in range(n)]
    schedules.ring_reduce_scatter(wire, range(n), chunks)
    wire.exchange([(rank, 0, chunks[rank]) for rank in range(1, n)])
    assert wire.vectors[0] == [total(n, at) for at in range(n * LENGTH)]
    return wire


def run_once(operation: str, nodes: Sequence[int]) -> Wire:
    """Gather, scatter and all_to_all have one step."""
    n = len(nodes)
    wire = Wire(start(n, "root" if operation == "scatter" else "all"))
    if operation == "all_to_all":
        wire.exchange(everyone(n, lambda a, b: chunk(b, LENGTH)))
    else:
        pairs = [(rank, 0) if operation == "gather" else (0, rank) for rank in range(1, n)]
        wire.exchange([(a, b, chunk(max(a, b), LENGTH)) for a, b in pairs])
    return wire


RUNS: dict[str, Callable[[Sequence[int]], Wire]] = {
    "all_reduce": run_all_reduce,
    "reduce_scatter": run_all_reduce,
    "all_gather": run_all_gather,
    "broadcast": run_broadcast,
    "reduce": run_reduce,
    "gather": lambda nodes: run_once("gather", nodes),
    "scatter": lambda nodes: run_once("scatter", nodes),
    "all_to_all": lambda nodes: run_once("all_to_all", nodes),
}


@pytest.mark.parametrize("operation", RUNS)
def test_bytes_and_steps_are_those_of_the_messages(operation: str) -> None:
    for nodes in PLACES:
        wire = RUNS[operation](nodes)
        phases = list_phases(operation, len(nodes) * LENGTH, nodes)  # the number of elements stands for bytes
        sent = [0.0] * len(nodes)
        for phase in phases:
            for sender, _ in phase.edges:
                sent[sender] += phase.num_rounds * phase.num_bytes
        assert max(sent) == pytest.approx(max(wire.sent(len(nodes)))), nodes
        assert sum(phase.steps for phase in phases) == wire.step, nodes


def test_every_operation_is_run() -> None:
    assert {*RUNS, "barrier"} == set(ALGORITHMS)
    assert set(BUS_FACTORS) == set(RUNS)


# ---- time


# Connections share the wire fairly, so messages to several ranks travel piece by piece in turn.
_PIECES = 32


def gloo_programs(operation: str, size: float, n: int) -> list[Program]:
    """Return what each rank posts and awaits, according to gloo's sources."""
    return [_gloo_program(operation, size, n, rank) for rank in range(n)]


def _gloo_program(operation: str, size: float, n: int, rank: int) -> Program:
    part = size / n
    if operation in ("all_reduce", "all_gather"):
        segments = 2 if operation == "all_gather" else max(2, -(-int(part) // 2**20))
        phases = 1 if operation == "all_gather" else 2
        program = []
        for _ in range(phases):
            program += _ring_program((n - 1) * segments, part / segments, n, rank)
        return program
    if operation == "all_to_all":
        waits: Program = [("wait send", 0, 0), ("wait recv", 0, 0)] * (_PIECES * (n - 1))
        pieces = [i for _ in range(_PIECES) for i in range(1, n)]
        return [
            *(("send", (rank + i) % n, part / _PIECES) for i in pieces),
            *(("recv", (rank - i) % n, part / _PIECES) for i in pieces),
            *waits,
        ]
    if operation == "barrier":
        program = []
        distance = 1
        while distance < n:
            program += [("recv", (rank - distance) % n, 0.0), ("send", (rank + distance) % n, 0.0)]
            program += [("wait recv", 0, 0), ("wait send", 0, 0)]
            distance *= 2
        return program
    if operation in ("gather", "scatter"):
        word, back = ("recv", "send") if operation == "gather" else ("send", "recv")
        if rank:
            return [(back, 0, part), (f"wait {back}", 0, 0)]
        return [*((word, peer, part) for peer in range(1, n)), *[(f"wait {word}", 0, 0.0)] * (n - 1)]
    assert operation == "broadcast"
    program = []
    if rank:
        parent = rank - (1 << (rank.bit_length() - 1))
        program = [("recv", parent, size / _PIECES)] * _PIECES + [("wait recv", 0, 0)] * _PIECES
    children = [rank + (1 << i) for i in range(rank.bit_length(), n.bit_length()) if rank + (1 << i) < n]
    sends: Program = [("send", child, size / _PIECES) for _ in range(_PIECES) for child in children]
    return [*program, *sends, *[("wait send", 0, 0.0)] * len(sends)]


def _ring_program(count: int, size: float, n: int, rank: int) -> Program:
    program: Program = []
    for i in range(count + 2):
        if i >= 2:
            program += [("wait recv", 0, 0), ("wait send", 0, 0)]
        if i < count:
            program += [("recv", (rank - 1) % n, size), ("send", (rank + 1) % n, size)]
    return program


@pytest.mark.parametrize(
    "operation", ["all_reduce", "all_gather", "all_to_all", "barrier", "gather", "scatter"]
)
@pytest.mark.parametrize(("alpha_s", "bytes_per_s"), [(25e-3, 12.5e6), (50e-6, 1e9)], ids=["wan", "local"])
def test_seconds_are_those_of_gloos_messages(operation: str, alpha_s: float, bytes_per_s: float) -> None:
    link = Link.of(alpha_s, bytes_per_s)
    for n in (2, 3, 4, 8):
        for size in (64, 65536, 2**20, 25 * 2**20):
            if operation == "barrier" and size > 64:
                continue
            took_s = simulate(gloo_programs(operation, size, n), alpha_s, 1 / bytes_per_s)
            found = predict(operation, size, range(n), Links(None, link))
            assert found == pytest.approx(took_s, rel=0.05), (n, size)


def test_a_broadcast_in_a_tree_takes_as_long_as_its_messages() -> None:
    link = Link.of(25e-3, 12.5e6)
    for n in (2, 4, 8):
        for size in (64, 2**20, 25 * 2**20):
            took_s = simulate(gloo_programs("broadcast", size, n), 25e-3, 1 / 12.5e6)
            found = predict("broadcast", size, range(n), Links(None, link))
            assert found == pytest.approx(took_s, rel=0.1), (n, size)


def test_round_trips_of_gloo_on_four_ranks() -> None:
    # Measured with 64 bytes over a round trip of 51 ms: 313, 158, 209, 105, 53, 53 and 53 ms.
    links = Links(None, Link.of(0.5, 1e12))
    trips = {op: predict(op, 64, range(4), links) for op in ALGORITHMS}
    assert trips == pytest.approx(
        {
            "all_reduce": 6,
            "reduce_scatter": 6,
            "all_gather": 3,
            "reduce": 4,
            "barrier": 2,
            "broadcast": 1.5,
            "gather": 1,
            "scatter": 1,
            "all_to_all": 1,
        },
        rel=1e-3,
    )


def test_the_slow_class_and_its_sharing_decide() -> None:
    links = Links(Link.of(1e-6, 1e9), Link.of(1e-6, 1e7))
    assert predict("all_reduce", 8e6, (0, 0, 1, 1), links) == pytest.approx(1.2, rel=0.01)
    assert predict("all_reduce", 8e6, (0, 1, 0, 1), links) == pytest.approx(2.4, rel=0.01)


def test_costs_inside_of_a_process_are_added() -> None:
    plain = predict("all_reduce", 8e6, (0, 1), FREE)
    more = Links(FREE.same_node, FREE.between_nodes, call_s=0.25, add=Curve.line(0.0, 1e-6))
    assert predict("all_reduce", 8e6, (0, 1), more) == pytest.approx(plain + 0.25 + 4)
    copies = Links(FREE.same_node, FREE.between_nodes, copy=Curve.line(0.0, 1e-6))
    assert predict("all_gather", 8e6, (0, 1), copies) == pytest.approx(
        predict("all_gather", 8e6, (0, 1), FREE) + 8
    )


def test_a_measured_curve_is_linear_between_its_points_and_never_falls_beyond_them() -> None:
    curve = Curve((64.0, 1024.0, 4096.0), (1.0, 2.0, 5.0))
    assert [curve(b) for b in (0, 64, 544, 1024, 2560, 4096, 7168)] == [1, 1, 1.5, 2, 3.5, 5, 8]
    assert Curve((1.0, 2.0), (3.0, 2.0))(100) == 2.0
