"""Simulates small training programs on several ranks, so that a changed setting can be simulated too.

A program lists what a rank does in a step. Collectives are served one after the other, each from the arrival
of its last rank on, for a constant time and a time per byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from paceline.profiling.intervals import as_spans, unite
from paceline.profiling.rank_trace import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    CodePlace,
    RankTrace,
    Reducer,
    TracedCollective,
    TracedStep,
)

MS = 1_000_000
HERE = "train.py:9 in main"


@dataclass(frozen=True)
class Busy:
    """Time in a phase; the empty one is Python code between phases."""

    phase: str
    ns: int


@dataclass(frozen=True)
class Issue:
    """A collective, of which the rank does not wait for the end yet."""

    num_bytes: int
    operation: str = "all_reduce"
    at: str = ""


@dataclass(frozen=True)
class Wait:
    """Waiting for the end of all collectives of the rank."""

    phase: str


Action = Busy | Issue | Wait
Program = Callable[[int, int, Random], Sequence[Action]]
"""Takes rank, number of the step and randomness."""


@dataclass(frozen=True)
class Network:
    per_call_ns: int = MS
    per_byte_ns: float = 1.0


class _Rank:
    def __init__(self, actions: Sequence[tuple[int, Action]]) -> None:
        self.actions = list(actions)
        self.place = self.now = 0
        self.spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.computed: list[tuple[int, int]] = []
        self.issues: list[tuple[int, Issue]] = []
        self.ends: list[int] = []  # of steps

    def spend(self, phase: str, until: int) -> None:
        if phase and until > self.now:
            self.spans[phase].append((self.now, until))
        self.now = max(self.now, until)


def run(
    program: Program,
    *,
    num_ranks: int = 2,
    num_steps: int = 6,
    network: Network | None = None,
    seed: int = 0,
    is_loader_inline: bool = True,
    reducers: Sequence[Reducer] = (),
) -> list[RankTrace]:
    """Return the traces of all ranks."""
    network = network or Network()
    ranks = [_prepare(program, rank, num_steps, seed) for rank in range(num_ranks)]
    ends: list[int] = []  # of collectives
    while any(rank.place < len(rank.actions) for rank in ranks):
        for rank in ranks:
            _advance(rank, ranks, ends, network)
    return [
        RankTrace(
            rank=number,
            world_size=num_ranks,
            steps=tuple(
                TracedStep(place, begin, end)
                for place, (begin, end) in enumerate(zip([0, *rank.ends], rank.ends, strict=False), 1)
            ),
            phases={name: unite(as_spans(spans)) for name, spans in rank.spans.items()},
            compute=unite(as_spans(rank.computed)),
            collectives=tuple(
                TracedCollective(issue.operation, "0", "", place, at, end, issue.num_bytes, issue.at)
                for place, ((at, issue), end) in enumerate(zip(rank.issues, ends, strict=True))
            ),
            is_loader_inline=is_loader_inline,
            reducers=tuple(reducers),
            samples=as_spans((at, 0) for at in range(0, rank.now, MS)),
            places=(CodePlace("train.py", 9, "main"),),
        )
        for number, rank in enumerate(ranks)
    ]


def _prepare(program: Program, rank: int, num_steps: int, seed: int) -> _Rank:
    random = Random(f"{seed} {rank}")
    steps = [(step, action) for step in range(num_steps) for action in program(rank, step, random)]
    return _Rank(steps)


def _advance(rank: _Rank, ranks: Sequence[_Rank], ends: list[int], network: Network) -> None:
    """Have a rank do what it can until it waits for a collective that others have not entered."""
    while rank.place < len(rank.actions):
        step, action = rank.actions[rank.place]
        if isinstance(action, Busy):
            begin = rank.now
            rank.spend(action.phase, begin + action.ns)
            rank.now = begin + action.ns
            if action.phase not in ("", DATA):
                rank.computed.append((begin, rank.now))
        elif isinstance(action, Issue):
            rank.issues.append((rank.now, action))
        else:
            number = len(rank.issues)
            if any(len(other.issues) < number for other in ranks):
                return
            while len(ends) < number:
                arrived = max(other.issues[len(ends)][0] for other in ranks)
                size = rank.issues[len(ends)][1].num_bytes
                service = network.per_call_ns + round(network.per_byte_ns * size)
                ends.append(max([arrived, *ends[-1:]]) + service)
            end = ends[number - 1] if number else rank.now
            rank.spend(action.phase, end)
        rank.place += 1
        if rank.place == len(rank.actions) or rank.actions[rank.place][0] != step:
            rank.ends.append(rank.now)


def take_step(
    random: Random,
    *,
    data: int = 2 * MS,
    forward: int = 10 * MS,
    backward: Sequence[tuple[int, int]] = ((20 * MS, 1 << 20),),
    after: Sequence[Action] = (),
    jitter: int = MS // 10,
) -> list[Action]:
    """Return a step of DDP: the backward computes and issues buckets in turn, and waits at its end."""
    return [
        Busy(DATA, data + random.randint(0, jitter)),
        Busy(FORWARD, forward + random.randint(0, jitter)),
        *(action for ns, size in backward for action in (Busy(BACKWARD, ns), Issue(size))),
        Wait(BACKWARD),
        Busy(OPTIMIZER, 2 * MS),
        *after,
    ]
