"""The numbers of a profile against brute force: every instant of short timelines is counted by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.profile_report import describe_profile
from paceline.errors import PacelineError
from paceline.profiling.analysis import RankStep, analyse
from paceline.profiling.intervals import Coverage, as_spans, measure, subtract, unite
from paceline.profiling.judge import judge_profile
from paceline.profiling.matching import bound_offset, match_collectives
from paceline.profiling.rank_trace import BACKWARD, DATA, FORWARD, HOST, PHASES, RankTrace, TracedCollective
from tests.profiling.timelines import MS, generate, simulate

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def instants(spans: object) -> set[int]:
    return {t for begin, end in spans for t in range(begin, end)}  # type: ignore[attr-defined]


@settings(max_examples=200)
@given(SPANS, SPANS, st.integers(-2, 32), st.integers(-2, 32))
def test_sets_of_instants(
    left: list[tuple[int, int]], right: list[tuple[int, int]], begin: int, end: int
) -> None:
    a, b = unite(as_spans(left)), unite(as_spans(right))
    for spans, expected in (
        (a, instants(left)),
        (unite(a, b), instants(left) | instants(right)),
        (subtract(a, b), instants(left) - instants(right)),
    ):
        assert instants(spans) == expected
        assert measure(spans) == len(expected)
        assert (spans[1:, 0] > spans[:-1, 1]).all()
    assert Coverage(a).measure(begin, end) == len(instants(left) & set(range(begin, end)))


def count(traces: list[RankTrace], rank: int, place: int) -> RankStep:
    """Count one step of a rank, instant by instant."""
    trace = traces[rank]
    step = trace.steps[place]
    window = range(step.begin_ns, step.end_ns)
    parts = trace.collectives
    by_key: dict[object, dict[int, TracedCollective]] = {}
    for each in traces:
        for part in each.collectives:
            by_key.setdefault(part.key, {})[each.rank] = part
    computed = instants(trace.compute)
    covered = {name: instants(spans) for name, spans in trace.phases.items()}
    waits = []
    for part in parts:  # in order of issue
        members = by_key[part.key]
        unlike = not part.sequence and len({other.operation for other in members.values()}) > 1
        if len(members) > 1 and not unlike:
            arrived = max(other.issued_ns for other in members.values())
            last = min(r for r, other in members.items() if other.issued_ns == arrived)
            waits.append((part.issued_ns, min(arrived, part.end_ns), last))
    links = find_links(traces)
    by_links = {}
    for kind in set(links.values()):
        own = {t for p in parts if links.get(p.key) == kind for t in range(p.issued_ns, p.end_ns)}
        by_links[kind] = len(own & set(window)), len((own - computed) & set(window))
    under_way = {t for part in parts for t in range(part.issued_ns, part.end_ns)}
    phases = dict.fromkeys([*(name for name in PHASES if name in trace.phases), HOST], 0)
    waiting: dict[int, int] = {}
    backward_comm = 0
    for t in window:
        label = next((name for name in PHASES if t in covered.get(name, ())), HOST)
        phases[label] += 1
        backward_comm += label == BACKWARD and t in under_way
        first = next((last for begin, end, last in waits if begin <= t < end), None)
        if first is not None and t not in computed:
            waiting[first] = waiting.get(first, 0) + 1
    return RankStep(
        rank=rank,
        step=step.number,
        total_ns=len(window),
        phases={name: n for name, n in phases.items() if n or name == HOST},
        compute_ns=len(computed & set(window)),
        comm_ns=len(under_way & set(window)),
        exposed_ns=len((under_way - computed) & set(window)),
        waiting_ns=waiting,
        backward_comm_ns=backward_comm,
        traffic=(),
        by_links=by_links,
    )


def find_links(traces: list[RankTrace]) -> dict[object, str]:
    """Return which collectives cross nodes, if there are several nodes."""
    links: dict[object, str] = {}
    if len({trace.host for trace in traces}) == 1:
        return links
    for key in {part.key for trace in traces for part in trace.collectives}:
        found = [(t.host, part.operation) for t in traces for part in t.collectives if part.key == key]
        if len(found) > 1 and (key[1] or len({operation for _, operation in found}) == 1):
            links[key] = "between nodes" if len({host for host, _ in found}) > 1 else "within a node"
    return links


@settings(max_examples=1000, derandomize=True)
@given(st.integers(2, 16), st.integers(0, 2**32))
def test_every_number_is_that_of_brute_force(num_ranks: int, seed: int) -> None:
    traces = generate(num_ranks, seed)
    if seed % 2:
        traces = [replace(trace, host="ab"[trace.rank >= num_ranks // 2]) for trace in traces]
    links = find_links(traces)
    matched, num_unlike = match_collectives(traces)
    if num_unlike > len(matched):
        with pytest.raises(PacelineError, match="PL904"):
            analyse(traces)
        return
    profile = analyse(traces)
    for row in profile.rows:
        place = row.step - 7
        phases = {name: n for name, n in row.phases.items() if n or name == HOST}
        assert replace(row, traffic=(), phases=phases) == count(traces, row.rank, place)
        begin, end = (getattr(traces[row.rank].steps[place], name) for name in ("begin_ns", "end_ns"))
        issued = [part for part in traces[row.rank].collectives if begin <= part.issued_ns < end]
        assert sum(traffic.count for traffic in row.traffic) == len(issued)
        for traffic in row.traffic:
            kind = traffic.group, traffic.operation, traffic.links
            same = [p for p in issued if (p.group, p.operation, links.get(p.key, "")) == kind]
            spans = [(part.issued_ns, min(end, part.end_ns)) for part in same]
            assert traffic.busy_ns == len(instants(spans))
            sizes = [part.num_bytes for part in same]
            assert traffic.num_bytes == (None if None in sizes else sum(sizes))  # type: ignore[arg-type]
    shares = []
    for rank in range(num_ranks):
        rows = [row for row in profile.rows if row.rank == rank]
        shares.append(sum(row.exposed_ns for row in rows) / sum(row.total_ns for row in rows))
    assert profile.exposed_share == max(shares)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(2, 9),
    st.sampled_from([DATA, FORWARD, BACKWARD]),
    st.integers(8, 200),
    st.integers(0, 2**32),
    st.data(),
)
def test_the_planted_rank_and_phase_are_blamed(
    num_ranks: int, phase: str, late_ms: int, seed: int, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, num_ranks - 1))
    profile = analyse(simulate(num_ranks, 4, late={late: (phase, late_ms * MS)}, seed=seed))
    assert [(blame.rank, blame.phase) for blame in profile.blames] == [(late, phase)]
    (blame,) = profile.blames
    assert blame.waiters == tuple(rank for rank in range(num_ranks) if rank != late)
    # The rank computes for up to 5 ms beside the first bucket, and jitters by 0.3 ms.
    assert (late_ms - 5.5) * MS <= blame.lost_ns <= (late_ms + 0.5) * MS


@settings(max_examples=30, derandomize=True)
@given(st.integers(2, 9), st.integers(0, 2**32))
def test_nobody_is_blamed_in_a_healthy_job(num_ranks: int, seed: int) -> None:
    assert analyse(simulate(num_ranks, 4, seed=seed)).blames == ()


def test_a_victim_is_not_blamed() -> None:
    """Rank 1 is late to rank 0's collective, as rank 1 has waited for rank 2 in another group."""
    traces = simulate(3, 2)
    spans = {0: [(0, 10)], 1: [(0, 10)], 2: [(0, 110)]}
    pair = TracedCollective("all_reduce", "1 and 2", "", 0, 0, 0)
    both = TracedCollective("all_reduce", "0 and 1", "", 0, 0, 0)
    own = {
        0: [replace(both, issued_ns=10, end_ns=115)],
        1: [replace(pair, issued_ns=10, end_ns=112), replace(both, issued_ns=113, end_ns=115)],
        2: [replace(pair, issued_ns=110, end_ns=112)],
    }
    step = replace(traces[0].steps[0], begin_ns=0, end_ns=120)
    traces = [
        replace(
            trace,
            steps=(step,),
            phases={DATA: as_spans(spans[trace.rank])},
            compute=as_spans([]),
            collectives=tuple(own[trace.rank]),
        )
        for trace in traces
    ]
    profile = analyse(traces)
    assert [(blame.rank, blame.phase, blame.waiters) for blame in profile.blames] == [(2, DATA, (1,))]


def test_offsets_of_clocks_are_bounded() -> None:
    first, other = simulate(2, 3, late={1: (DATA, 4 * MS)})
    moved = tuple(
        replace(part, issued_ns=part.issued_ns + 2000 * MS, end_ns=part.end_ns + 2000 * MS)
        for part in other.collectives
    )
    bounds = bound_offset(first, replace(other, collectives=moved))
    assert bounds is not None
    assert bounds[0] <= 2000 * MS <= bounds[1]
    assert bounds[1] - bounds[0] < 20 * MS
    assert bound_offset(first, replace(other, collectives=())) is None


def test_traces_of_other_steps_are_refused() -> None:
    first, other = simulate(2, 2)
    steps = tuple(replace(step, number=step.number + 10) for step in other.steps)
    with pytest.raises(PacelineError, match=r"rank 0 has 1 to 2, rank 1 has 11 to 12.*\[PL903\]"):
        analyse([first, replace(other, steps=steps)])
    with pytest.raises(PacelineError, match=r"rank 1 has no step.*\[PL903\]"):
        analyse([first, replace(other, steps=())])


def test_traces_of_different_programs_are_refused() -> None:
    first, other = simulate(2, 2)
    parts = tuple(replace(part, operation="broadcast") for part in other.collectives)
    with pytest.raises(PacelineError, match=r"different operations.*\[PL904\]"):
        analyse([first, replace(other, collectives=parts)])


def test_thousands_of_ranks_are_reported() -> None:
    """Each number of a rank or a step is found in one pass over all rows."""
    profile = analyse(simulate(2, 4, late={1: (DATA, 30 * MS)}))
    num_ranks = 4096
    rows = tuple(
        replace(row, rank=2 * pair + row.rank) for pair in range(num_ranks // 2) for row in profile.rows
    )
    large = replace(profile, ranks=tuple(range(num_ranks)), rows=rows, world_size=num_ranks)
    assert large.exposed_rank == profile.exposed_rank
    assert large.exposed_share == profile.exposed_share
    assert large.median_step == profile.median_step
    assert large.worst_step == profile.worst_step
    text = describe_profile(large, judge_profile(large))
    assert "(4080 more)" in text
