"""`paceline plan SCRIPT --recorded PROFILE`: an unmodified script on other ranks, links and buckets."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.output import format_rows
from paceline.errors import PacelineError
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.plan.cluster import Cluster
    from paceline.plan.fit import Constants, Interval
    from paceline.plan.recorded import Projection, RecordedStep
    from paceline.profiling.analysis import Profile

_BUCKETS_MB = (5, 25, 100)


def run(args: argparse.Namespace, cluster: Cluster, fit: Constants) -> int:
    """Print the step on each size of the cluster; return 0.

    Raises:
        PacelineError: PL900 to PL904 for traces that cannot be read, PL940 for a recording without
            communication.
    """
    from paceline.plan.fit import find_interval
    from paceline.plan.recorded import change_buckets, project
    from paceline.profiling.analysis import analyse
    from paceline.profiling.read import read_traces

    traces = read_traces([args.recorded])
    step = read_step(analyse(traces), args.recorded)
    remark = ""
    if cluster.processor.is_cpu == any(trace.device is not None for trace in traces):
        there = "CPUs" if not cluster.processor.is_cpu else "GPUs"
        remark = f"recorded on {there}: work takes their time, and only the links are those of the cluster"
    rows: list[tuple[Projection, Interval]] = []
    for part in _list_sizes(cluster):
        found = project(step, part, fit.contention)
        # The work was measured; only what is exposed is a prediction.
        bar = find_interval(max(found.exposed_s, 1e-9), "probed" if cluster.is_probed else "hardware")
        rows.append((found, bar))
    buckets = [
        (size, project(change_buckets(step, size * 2**20), cluster, fit.contention)) for size in _BUCKETS_MB
    ]
    if args.json:
        table = [asdict(found) | {"efficiency": _ends(found, bar)} for found, bar in rows]
        print(json.dumps({"recorded": asdict(step), "projected": table, "remark": remark}))
    else:
        print("\n".join(_describe(step, args.target, cluster, rows, buckets, remark)))
    return 0


def read_step(profile: Profile, path: Path) -> RecordedStep:
    """Return the recorded step of the rank whose communication is exposed least, a median over steps.

    Raises:
        PacelineError: PL940.
    """
    from paceline.plan.call_sizes import BUS_FACTORS
    from paceline.plan.recorded import RecordedStep
    from paceline.plan.traffic import StepCall

    least = min(profile.ranks, key=lambda rank: sum(r.exposed_ns for r in profile.rows if r.rank == rank))
    rows = [row for row in profile.rows if row.rank == least]
    usual = sorted(rows, key=lambda row: row.total_ns)[len(rows) // 2]
    calls = []
    for traffic in usual.traffic:
        if traffic.operation in BUS_FACTORS and traffic.num_bytes and traffic.count:
            once = traffic.num_bytes / traffic.count
            # An all-gather's input is a part of what its size is counted by.
            once *= profile.world_size if traffic.operation == "all_gather" else 1
            calls.append(StepCall("", traffic.operation, once, profile.world_size, traffic.count))
    if not calls:
        raise PacelineError(
            "PL940",
            saw=f"--recorded {path}: no collective of known size in its steps.",
            rule="The step on other ranks follows from what ranks exchange, so two ranks are recorded.",
            fix="Record two ranks: paceline profile --nproc-per-node 2 train.py.",
        )
    comm = statistics.mean(row.comm_ns for row in rows)
    inside = statistics.mean(row.backward_comm_ns for row in rows)
    return RecordedStep(
        num_ranks=profile.world_size,
        step_s=usual.total_ns / 1e9,
        work_s=(usual.total_ns - usual.exposed_ns) / 1e9,
        backward_s=usual.phases.get("backward", 0) / 1e9,
        calls=tuple(calls),
        backward_share=min(1.0, inside / comm) if comm else 0.0,
    )


def _list_sizes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with 2, 4 ... ranks, up to all."""
    ranks = 2
    while ranks < cluster.num_ranks:
        per_node = min(ranks, cluster.ranks_per_node)
        if ranks % per_node == 0:
            yield replace(cluster, nodes=ranks // per_node, ranks_per_node=per_node)
        ranks *= 2
    yield cluster


def _ends(found: Projection, bar: Interval) -> tuple[float, float]:
    """Return the ends of the efficiency."""
    work = found.step_s - found.exposed_s
    low, high = (work / (work + found.exposed_s * end / bar.s) for end in (bar.high_s, bar.low_s))
    return low, high


def _describe(
    step: RecordedStep,
    name: str,
    cluster: Cluster,
    rows: Sequence[tuple[Projection, Interval]],
    buckets: Sequence[tuple[int, Projection]],
    remark: str,
) -> Iterator[str]:
    sent = math.fsum(call.num_bytes * call.times for call in step.calls)
    yield (
        f"{name}: recorded on {step.num_ranks} ranks, {format_seconds(step.step_s)} per step, "
        f"{format_seconds(step.work_s)} of it own work; {sent / 2**20:.1f} MiB in "
        f"{sum(call.times for call in step.calls):.0f} collectives, {step.backward_share:.0%} in backward"
    )
    yield f"{cluster}; each rank keeps its work and its share of the batch"
    yield f"{remark}\n" if remark else ""
    table = [("ranks", "step", "efficiency", "80% interval", "communication", "exposed")]
    for found, bar in rows:
        low, high = _ends(found, bar)
        step_s, comm_s = format_seconds(found.step_s), format_seconds(found.comm_s)
        shares = f"{found.efficiency:.0%}", f"{low:.0%} to {high:.0%}"
        table.append((str(found.num_ranks), step_s, *shares, comm_s, f"{found.exposed_s / found.step_s:.0%}"))
    yield format_rows(table)
    sizes = ", ".join(f"{size} MiB {format_seconds(found.step_s)}" for size, found in buckets)
    yield f"\nwith buckets of other sizes, on {cluster.num_ranks} ranks: {sizes}"
