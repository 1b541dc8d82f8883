"""Formats the results of benchmarks as tables and bars for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.bench.buckets import Buckets
    from paceline.bench.overhead import Overhead
    from paceline.bench.scaling import Scaling, ScalingPoint
    from paceline.bench.spread import Spread

_BAR_WIDTH = 40


def describe_scaling(scaling: Scaling) -> str:
    """Return a table of throughput, speed-up and efficiency, with bars and what was measured."""
    table = [("ranks", "samples/s", "tokens/s", "step", "speed-up", "efficiency", "of at best", "waiting")]
    for point in scaling.points:
        table.append(
            (
                str(point.num_ranks),
                _rate(point.samples_per_s),
                "-" if point.tokens_per_s is None else format_count(point.tokens_per_s.median),
                format_seconds(point.step_s),
                _span(point.speedup, ".2f"),
                _span(point.efficiency, ".0%"),
                f"{point.best_efficiency:.0%}",
                f"{point.comm_share:.0%}",
            )
        )
    return "\n\n".join([_describe_conditions(scaling), format_rows(table), _draw_bars(scaling.points)])


def describe_overhead(overhead: Overhead) -> str:
    """Return the step time with and without communication, and the conditions of the measurement."""
    conditions = _describe_pairs("overhead of communication", overhead, overhead.comm_share.confidence)
    rows = [
        ("whole step", _milliseconds(overhead.total_s), ""),
        ("compute alone", _milliseconds(overhead.compute_s), "on the slowest rank"),
        ("share of communication", _span(overhead.comm_share, ".1%"), "of the whole step, pair by pair"),
        (
            "waited for ranks and wire",
            f"{overhead.exposed_share:.1%}",
            "by the trainer's own clock, as in metrics",
        )
        if overhead.device == "cpu"
        else ("waited for ranks and wire", "-", "not seen by the host on CUDA"),
        ("uneven compute", f"{overhead.imbalance:.1%}", "the average rank has so much less than the slowest"),
    ]
    return "\n\n".join([conditions, _format_facts(rows)])


def describe_buckets(found: Buckets) -> str:
    """Return a table of the sizes, and the best one."""
    confidence = found.sizes[0].step_s.confidence
    conditions = _describe_pairs(
        f"buckets, {found.reduction} reduction", found, confidence, "blocks per size"
    )
    table = [("bucket", "step", f"of {found.own_mib:g} MiB", "")]
    for size in found.sizes:
        is_whole = size.mib * (1 << 20) >= found.gradient_bytes
        table.append(
            (
                f"{size.mib:g} MiB",
                _milliseconds(size.step_s),
                "" if size.mib == found.own_mib else _span(size.ratio, ".3f"),
                "one bucket holds all" if is_whole else "",
            )
        )
    best = next(size for size in found.sizes if size.mib == found.best_mib)
    verdict = (
        f"best: ddp.bucket_cap_mb = {best.mib:g}, {_span(best.ratio, '.3f')} of {found.own_mib:g} MiB"
        if found.is_better
        else f"no size is faster than {found.own_mib:g} MiB beyond the noise"
    )
    rows = "\n".join(map(str.rstrip, format_rows(table).splitlines()))
    return "\n\n".join([conditions, rows, verdict])


def _describe_pairs(
    title: str, found: Overhead | Buckets, confidence: float, blocks: str = "pairs of blocks"
) -> str:
    """Return the conditions under which pairs of blocks were measured."""
    threads = f"{found.threads_per_rank} thread{'s' if found.threads_per_rank > 1 else ''}"
    lines = [
        f"{title}: {format_count(found.num_parameters)} parameters on {found.num_ranks} "
        f"rank{'s' if found.num_ranks > 1 else ''}, {found.device}",
        f"  global batch of {found.global_batch_size} samples, microbatches of {found.microbatch_size}, "
        f"{format_bytes(found.gradient_bytes)} of gradients per step, {threads} per rank",
        f"  {found.num_repeats} {blocks} of {found.num_steps} steps, alternating; median and "
        f"{confidence:.0%} confidence interval",
    ]
    if found.device == "cpu" and found.num_ranks * found.threads_per_rank > found.num_cores:
        lines.append(
            f"  {found.num_ranks} ranks of {threads} are more than the {found.num_cores} cores: "
            "they wait for each other"
        )
    return "\n".join(lines)


def _format_facts(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return names, values and remarks in columns."""
    width, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a:<{width}}  {b:<{values}}  {c}".rstrip() for a, b, c in rows)


def format_rows(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as aligned columns; the first column to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _describe_conditions(scaling: Scaling) -> str:
    first = scaling.points[0]
    threads = scaling.threads_per_rank
    lines = [
        f"scaling of {format_count(scaling.num_parameters)} parameters on {scaling.device}, "
        f"microbatches of {scaling.microbatch_size}",
        (
            f"  weak: the global batch grows with the ranks, from {first.global_batch_size} samples"
            if scaling.weak
            else f"  strong: the same global batch of {first.global_batch_size} samples, shared out"
        ),
        f"  {threads} thread{'s' if threads > 1 else ''} per rank everywhere, so one rank does not use "
        f"the whole machine ({scaling.num_cores} cores)",
        f"  {scaling.num_steps} steps after {scaling.num_warm_up} of warm-up, "
        + (
            "once"
            if scaling.num_repeats == 1
            else f"median of {scaling.num_repeats} repeats ({_confidence(first.samples_per_s)})"
        ),
    ]
    most = scaling.points[-1].num_ranks
    if scaling.device == "cpu" and most * threads > scaling.num_cores:
        lines.append(
            f"  {most} ranks of {threads} thread{'s' if threads > 1 else ''} are more than the "
            f"{scaling.num_cores} cores: they wait for each other"
        )
    return "\n".join(lines)


def _draw_bars(points: list[ScalingPoint]) -> str:
    """Return a bar per number of ranks, with a mark at the throughput of perfect scaling."""
    base = points[0].samples_per_s.median / points[0].num_ranks
    top = max(max(point.samples_per_s.median, base * point.num_ranks) for point in points)
    lines = []
    for point in points:
        filled = round(_BAR_WIDTH * point.samples_per_s.median / top)
        ideal = round(_BAR_WIDTH * base * point.num_ranks / top)
        bar = "".join(
            "█" if place < filled else "|" if place == ideal - 1 else " " for place in range(_BAR_WIDTH)
        )
        rate = f"{point.samples_per_s.median:.4g} samples/s"
        lines.append(f"{point.num_ranks:>4} {'rank ' if point.num_ranks == 1 else 'ranks'}  {bar}  {rate}")
    return "\n".join([*lines, f"            (| is {points[0].num_ranks}-rank throughput times the ranks)"])


def _rate(spread: Spread) -> str:
    return _span(spread, ".4g")


def _span(spread: Spread, spec: str) -> str:
    if spread.num_values == 1 or spread.low == spread.high:
        return f"{spread.median:{spec}}"
    return f"{spread.median:{spec}} ({spread.low:{spec}}..{spread.high:{spec}})"


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.4g} ms ({spread.low * 1e3:.4g}..{spread.high * 1e3:.4g})"


def _confidence(spread: Spread) -> str:
    return f"{spread.confidence:.0%} confidence interval in brackets"
