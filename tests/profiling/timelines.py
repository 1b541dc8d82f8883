"""Generates timelines of ranks: random ones for brute force, and simulated jobs with a known late rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from paceline.profiling.intervals import Spans, as_spans, subtract, unite
from paceline.profiling.rank_trace import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
    RankTrace,
    TracedCollective,
    TracedStep,
)

LENGTH = 48


def clip(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """Return the part of disjoint spans between two instants."""
    cut = np.clip(spans, begin_ns, end_ns)
    return cut[cut[:, 1] > cut[:, 0]]


def intersect(left: Spans, right: Spans) -> Spans:
    """Return the instants that both cover."""
    return subtract(left, subtract(left, right))


def generate(num_ranks: int, seed: int) -> list[RankTrace]:
    """Return random traces on a short axis of whole numbers; nothing about them is plausible."""
    random = Random(seed)
    groups = [("world", list(range(num_ranks)))]
    if num_ranks > 2:
        groups.append(("some", random.sample(range(num_ranks), random.randint(1, num_ranks))))
    calls: dict[int, list[tuple[str, str, int, str]]] = {rank: [] for rank in range(num_ranks)}
    for name, members in groups:
        for number in range(random.randint(0, 4)):
            for rank in members:
                calls[rank].append((name, "", number, random.choice(["all_reduce"] * 9 + ["barrier"])))
    sender, receiver = random.sample(range(num_ranks), 2)
    calls[sender].append(("world", f"{sender}>{receiver}", 0, "send"))
    calls[receiver].append(("world", f"{sender}>{receiver}", 0, "recv"))
    return [_generate_rank(random, rank, num_ranks, calls[rank]) for rank in range(num_ranks)]


def _generate_rank(
    random: Random, rank: int, num_ranks: int, calls: list[tuple[str, str, int, str]]
) -> RankTrace:
    def spans(most: int, longest: int) -> list[tuple[int, int]]:
        begins = [random.randrange(LENGTH) for _ in range(random.randint(0, most))]
        return [(begin, begin + random.randint(0, longest)) for begin in begins]

    edges = sorted(random.sample(range(LENGTH), 4))
    gap = random.randint(0, 1)
    parts = []
    # No two issues of a rank at the same time: their order would be open.
    for issued, (group, sequence, number, operation) in zip(
        random.sample(range(LENGTH), len(calls)), calls, strict=True
    ):
        size = random.choice([None, 8, 800])
        end = issued + random.randint(0, 16)
        parts.append(TracedCollective(operation, group, sequence, number, issued, end, size))
    return RankTrace(
        rank=rank,
        world_size=num_ranks,
        steps=(TracedStep(7, edges[0], edges[1]), TracedStep(8, edges[1] + gap, edges[2] + 1 + gap)),
        phases={name: unite(as_spans(spans(3, 12))) for name in PHASES if random.random() < 0.8},
        compute=unite(as_spans(spans(8, 6))),
        collectives=tuple(sorted(parts, key=lambda part: part.issued_ns)),
        clock_error_ns=random.choice([0, 0, 1]),
    )


MS = 1_000_000


def simulate(
    num_ranks: int,
    num_steps: int,
    *,
    late: dict[int, tuple[str, int]] | None = None,
    spread: tuple[int, int] = (-1, 0),
    seed: int = 0,
    jitter_ns: int = MS // 10,
) -> list[RankTrace]:
    """Return the traces of a job whose ranks sum gradients in two buckets, the first during the backward.

    Args:
        num_ranks, num_steps: size of the job.
        late: by rank, a phase and the nanoseconds that it takes longer there, in every step.
        spread: a rank, and the nanoseconds that it takes longer in every step, in its phases by chance.
        seed: of the jitter.
        jitter_ns: the most that a phase takes longer by chance.
    """
    random = Random(seed)
    late = late or {}
    length = {DATA: 2 * MS, FORWARD: 10 * MS, BACKWARD: 20 * MS, OPTIMIZER: 3 * MS}
    now = dict.fromkeys(range(num_ranks), 1000 * MS)
    traces = [RankTrace(rank, num_ranks, (), {}, as_spans([]), ()) for rank in range(num_ranks)]
    spans: dict[int, dict[str, list[tuple[int, int]]]] = {
        rank: {phase: [] for phase in length} for rank in range(num_ranks)
    }
    computed: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(num_ranks)}
    for number in range(1, num_steps + 1):
        begin, issued = dict(now), {}
        for rank in range(num_ranks):
            cuts = sorted((0.0, 1.0, *((random.random(), random.random()) if rank == spread[0] else ())))
            parts = [second - first for first, second in pairwise(cuts)]
            more = dict(zip((DATA, FORWARD, BACKWARD), parts, strict=False))
            for phase in (DATA, FORWARD, BACKWARD):
                duration = length[phase] + random.randint(0, jitter_ns)
                if rank in late and late[rank][0] == phase:
                    duration += late[rank][1]
                if rank == spread[0]:
                    duration += round(more[phase] * spread[1])
                spans[rank][phase].append((now[rank], now[rank] + duration))
                if phase != DATA:
                    computed[rank].append((now[rank], now[rank] + duration))
                now[rank] += duration
            issued[rank] = (now[rank] - 5 * MS, now[rank])
        for place in range(2):
            arrived = max(times[place] for times in issued.values())
            end = max(arrived + 2 * MS, *(now.values() if place else [0]))
            for rank in range(num_ranks):
                part = TracedCollective(
                    "all_reduce", "world", "", 2 * number + place, issued[rank][place], end, 400
                )
                own = traces[rank]
                traces[rank] = replace(own, collectives=(*own.collectives, part))
        for rank in range(num_ranks):
            first, last = spans[rank][BACKWARD][-1]
            spans[rank][BACKWARD][-1] = first, max(last, end)
            now[rank] = end + length[OPTIMIZER]
            spans[rank][OPTIMIZER].append((end, now[rank]))
            computed[rank].append((end, now[rank]))
            step = TracedStep(number, begin[rank], now[rank])
            traces[rank] = replace(traces[rank], steps=(*traces[rank].steps, step))
    return [
        replace(
            trace,
            phases={name: unite(as_spans(pairs)) for name, pairs in spans[trace.rank].items()},
            compute=unite(as_spans(computed[trace.rank])),
        )
        for trace in traces
    ]
