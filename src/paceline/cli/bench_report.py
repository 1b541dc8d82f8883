"""What the benchmarks found, as tables and bars for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.units import format_count, format_seconds

if TYPE_CHECKING:
    from paceline.bench.scaling import Scaling, ScalingPoint
    from paceline.bench.spread import Spread

_BAR_WIDTH = 40


def describe_scaling(scaling: Scaling) -> str:
    """A table of throughput, speed-up and efficiency, with bars and what was measured."""
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


def format_rows(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as aligned columns; the first column to the left, numbers to the right."""
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
            f"  {most} ranks of {threads} thread{'s' if threads > 1 else ''} are more than the {scaling.num_cores} cores: they wait "
            "for each other"
        )
    return "\n".join(lines)


def _draw_bars(points: list[ScalingPoint]) -> str:
    """A bar per number of ranks, with a mark where throughput in proportion to the ranks would be."""
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


def _confidence(spread: Spread) -> str:
    return f"{spread.confidence:.0%} confidence interval in brackets"
