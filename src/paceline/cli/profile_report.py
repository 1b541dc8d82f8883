"""Formats a profile, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from paceline.cli.output import format_rows
from paceline.finding import Finding
from paceline.phrases import name_ranks
from paceline.profiling.analysis import Profile, RankStep
from paceline.profiling.judge import grade_exposed, grade_overlap
from paceline.profiling.rank_trace import HOST, PHASES
from paceline.units import format_bytes, format_seconds

_MOST_ROWS = 16
# A phase that is shorter in all steps has no column.
_LEAST_NS = 100_000
# A share of the step, from which waiting for a core is reported.
_MUCH_WAITING = 0.05
_RAN = ("data", "forward", "backward", "optimizer", "reading values", "garbage collection")


def describe_profile(profile: Profile, findings: Sequence[Finding]) -> str:
    """Return the report: times by rank, communication by operation, the grades, and the findings."""
    parts = [
        _describe_head(profile),
        _tabulate_ranks(profile),
        _tabulate_traffic(profile),
    ]
    parts += [_describe_grades(profile), *(str(finding) for finding in findings)]
    if not findings:
        parts.append("No rank keeps the others waiting, and communication is hidden well enough.")
    elif not any(finding.code in ("PL910", "PL913") for finding in findings):
        parts.append("No rank keeps the others waiting.")
    return "\n\n".join(filter(None, [*parts, "\n".join(_describe_limits(profile))]))


def as_table(profile: Profile, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all numbers, JSON-able."""
    table = asdict(profile)
    for name in ("exposed_share", "overlap", "waiting_share", "backward_comm_share"):
        table[name] = getattr(profile, name)
    table["idle_shares"] = profile.idle_shares()
    table["median_step"], table["worst_step"] = profile.median_step, profile.worst_step
    table["findings"] = [asdict(finding) for finding in findings]
    return table


def _describe_head(profile: Profile) -> str:
    first, last = profile.steps[0], profile.steps[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    median, worst = profile.median_step, profile.worst_step
    return (
        f"{name_ranks(profile.ranks)} of {profile.world_size}, {which}: "
        f"{_milliseconds(profile.step_ns(median))} ms per step (median), "
        f"{_milliseconds(profile.step_ns(worst))} ms in the longest, step {worst}"
    )


def _tabulate_ranks(profile: Profile) -> str:
    """Return the mean step of each rank: its phases, and the communication within them."""
    used = [name for name in _RAN if max(row.phases.get(name, 0) for row in profile.rows) > _LEAST_NS] + [
        HOST
    ]
    assert set(used) <= {*PHASES, HOST}
    head = ["ms per step", "total", *used, "compute", "comm", "exposed", "waiting"]
    on_device = [name for name in ("copies_ns", "idle_ns") if any(row.idle for row in profile.rows)]
    lines = [[*head, *(name.removesuffix("_ns") for name in on_device)]]
    ranks = profile.ranks if len(profile.ranks) <= _MOST_ROWS else _choose_ranks(profile)
    for rank in ranks:
        rows = [row for row in profile.rows if row.rank == rank]
        values = [*_list_values(used), *map(attrgetter, on_device)]
        cells = [_mean(rows, row_value) for row_value in values]
        lines.append([f"rank {rank}", *(_milliseconds(value) for value in cells)])
    if len(ranks) < len(profile.ranks):
        lines.append([f"({len(profile.ranks) - len(ranks)} more)"])
    return format_rows(lines)


def _choose_ranks(profile: Profile) -> list[int]:
    """Return the ranks that are exposed most."""
    exposed = dict.fromkeys(profile.ranks, 0)
    for row in profile.rows:
        exposed[row.rank] += row.exposed_ns
    return sorted(sorted(exposed, key=lambda rank: -exposed[rank])[:_MOST_ROWS])


def _list_values(phases: Sequence[str]) -> list[Any]:
    values: list[Any] = [lambda row: row.total_ns]
    values += [lambda row, name=name: row.phases.get(name, 0) for name in phases]
    values += [lambda row: row.compute_ns, lambda row: row.comm_ns, lambda row: row.exposed_ns]
    return [*values, lambda row: sum(row.waiting_ns.values())]


def _mean(rows: Sequence[RankStep], value: Any) -> float:
    return float(sum(value(row) for row in rows) / len(rows))


def _tabulate_traffic(profile: Profile) -> str:
    """Return communication by group and operation, as means over ranks and steps."""
    totals: dict[tuple[str, str, str, str], list[float]] = {}
    for row in profile.rows:
        for traffic in row.traffic:
            key = traffic.group, traffic.operation, traffic.at, traffic.links
            total = totals.setdefault(key, [0, 0, 0])
            total[0] += traffic.count
            total[1] += traffic.num_bytes if traffic.num_bytes is not None else float("nan")
            total[2] += traffic.busy_ns
    if not totals:
        return "no collectives"
    has_lines, has_links = any(key[2] for key in totals), any(key[3] for key in totals)
    head = ["per rank and step", "group", "count", "input", "ms under way"]
    lines = [[*head, *["links"] * has_links, *["line"] * has_lines]]
    number = len(profile.rows)
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])
    for (group, operation, at, links), (count, size, busy) in ordered[:_MOST_ROWS]:
        known = "?" if size != size else format_bytes(size / number)
        cells = [operation, group or "?", f"{count / number:.3g}", known, _milliseconds(busy / number)]
        lines.append([*cells, *[links] * has_links, *[at] * has_lines])
    if len(ordered) > _MOST_ROWS:
        lines.append([f"({len(ordered) - _MOST_ROWS} more)"])
    return format_rows(lines)


def _describe_grades(profile: Profile) -> str:
    exposed = profile.exposed_share
    text = (
        f"exposed communication: {exposed:.1%} of the step ({grade_exposed(exposed)}), on "
        f"{name_ranks([profile.exposed_rank])}, the most exposed"
    )
    if profile.num_matched:
        text += f"; {profile.waiting_share:.1%} is waiting for other ranks"
    if profile.overlap is not None:
        text += (
            f"\noverlap: {profile.overlap:.2f} of communication is hidden ({grade_overlap(profile.overlap)})"
        )
    if profile.backward_comm_share is not None:
        text += f"\nbackward: collectives are under way in {profile.backward_comm_share:.0%} of it"
    shares = profile.idle_shares()
    if shares:
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in shares.items())
        rank = name_ranks([profile.idle_rank])
        text += f"\nidle GPU: {sum(shares.values()):.1%} of the step of {rank} ({causes})"
    for kind in profile.rows[0].by_links:
        spans = [row.by_links[kind] for row in profile.rows]
        busy, bare = (_milliseconds(sum(ns) / len(spans)) for ns in zip(*spans, strict=True))
        text += f"\n{kind}: {busy} ms per step under way, {bare} ms exposed"
    return text


def _describe_limits(profile: Profile) -> list[str]:
    lines = list(profile.remarks)
    if profile.num_uncertain:
        error = format_seconds(profile.clock_error_ns / 1e9)
        lines.append(
            f"{profile.num_uncertain} waits are shorter than the error of the clocks (up to {error}): "
            "which rank waited is not known, and no rank is blamed for them."
        )
    if profile.num_unmatched:
        lines.append(
            f"{profile.num_unmatched} parts of collectives are in one trace only; they count as transfer."
        )
    core = _mean(profile.rows, lambda row: row.core_ns)
    if core > _MUCH_WAITING * _mean(profile.rows, lambda row: row.total_ns):
        lines.append(
            f"Ranks waited {_milliseconds(core)} ms per step for a core: other threads or programs used all "
            "of them, which makes ranks late by chance."
        )
    if profile.slowdown is not None:
        lines.append(f"Steps took {profile.slowdown:.2f} times as long while they were recorded as before.")
    return [f"note: {line}" for line in lines]


def _milliseconds(ns: float) -> str:
    return f"{ns / 1e6:.1f}" if ns < 1e8 else f"{ns / 1e6:.0f}"
