"""Formats the results of benchmarks as tables for people."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli.output import format_rows
from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.bench.scaling import Scaling
    from paceline.bench.spread import Spread
    from paceline.bench.variants import Variants

# Below it, the time of a collective is mostly latency.
_SMALL_BYTES = 256 << 10
_WIDE_SHARE = 0.25


def describe_scaling(scaling: Scaling) -> str:
    """Return a table of throughput, speed-up and efficiency, what was measured, and a verdict."""
    first = scaling.points[0]
    rate = "samples/s" if first.samples_per_step else "steps of ranks/s"
    table: list[tuple[str, ...]] = [
        ("ranks", rate, "per rank", "step", "speed-up", "efficiency", "exposed", "waiting")
    ]
    for point in scaling.points:
        total_s = sum(point.parts_s.values())
        shares = [f"{point.parts_s[name] / total_s:.0%}" if total_s else "-" for name in ("wire", "waiting")]
        table.append(
            (
                str(point.num_ranks),
                f"{point.samples_per_s:.4g}",
                f"{point.samples_per_s.median / point.num_ranks:.4g}",
                format_seconds(point.step_s),
                f"{point.speedup:.2f}",
                f"{point.efficiency:.0%}",
                *shares,
            )
        )
    parts = [_describe_conditions(scaling), format_rows(table)]
    return "\n\n".join([*parts, *judge_scaling(scaling)])


def judge_scaling(scaling: Scaling) -> list[str]:
    """Return whether the efficiency on the most ranks is good, and what costs most."""
    from paceline.bench.scaling import GOOD_EFFICIENCY, find_excess

    first, last = scaling.points[0], scaling.points[-1]
    if first is last:
        return []
    share = last.efficiency
    is_good, is_poor = share.low >= GOOD_EFFICIENCY, share.high < GOOD_EFFICIENCY
    if share.says_nothing and not is_good and not is_poor:
        return [_say_nothing(f"efficiency of {share:.0%}")]
    side = "above" if is_good else "below" if is_poor else "around"
    said = (
        f"{last.num_ranks} ranks reach {share.median:.0%} of {last.num_ranks // first.num_ranks} times the "
        f"throughput of {first.num_ranks}: {side} {GOOD_EFFICIENCY:.0%}."
    )
    excess = find_excess(first, last)
    most = max(excess, key=lambda name: excess[name], default="")
    if not most or excess[most] <= 0:
        return [said]
    if sum(excess.values()) < (1 - share.median) * last.step_s / 2:
        return [f"{said} The recorded steps lose less than half as much, so they do not show why."]
    cost = (
        f"{format_seconds(excess[most])} of a recorded step of {format_seconds(sum(last.parts_s.values()))}"
    )
    return [f"{said} Most of the loss, {cost}: {_explain_excess(most, excess[most], scaling)}."]


def _explain_excess(name: str, seconds: float, scaling: Scaling) -> str:
    last = scaling.points[-1]
    if name == "wire":
        each = last.comm_bytes / max(1, last.num_calls)
        sent = f"{format_bytes(last.comm_bytes)} in {last.num_calls} collectives per step"
        if each < _SMALL_BYTES:
            return (
                f"too little work per collective ({sent}): their latency counts. Compute more between "
                "them: a larger batch or model, or accumulation under no_sync()"
            )
        return (
            f"bandwidth ({sent}, {format_bytes(last.comm_bytes / seconds)}/s beyond what computation hides). "
            "Send less often or less: accumulation under no_sync(), a compressed or bf16 reduction"
        )
    return {
        "waiting": "barriers: ranks wait for the latest one. `paceline profile` names it",
        "computing": f"computation itself, as {last.num_ranks} ranks of {scaling.threads_per_rank} "
        f"thread{'s' if scaling.threads_per_rank > 1 else ''} share {scaling.num_cores} cores and the "
        "memory's bandwidth",
        "loading": "data: the loader takes longer. Give it workers, or lighter samples",
    }.get(name, "Python code between the phases. `paceline profile` shows its lines")


def _say_nothing(what: str) -> str:
    return (
        f"No information: {what} is within what this machine varies by itself. Measure again while nothing "
        "else runs, or with more --steps and --repeats."
    )


def describe_overhead(found: Variants) -> str:
    """Return the step time with and without communication, and the conditions of the measurement."""
    whole, alone = found.ways["whole"], found.ways["alone"]
    ratio = alone.ratio
    share = replace(ratio, median=1 - ratio.median, low=1 - ratio.high, high=1 - ratio.low)
    conditions = _describe_pairs("overhead of communication", found, ratio.confidence, "pairs of blocks")
    rows = [
        ("whole step", _milliseconds(whole.step_s), ""),
        ("compute alone", _milliseconds(alone.step_s), "on the slowest rank"),
        ("share of communication", f"{share:.1%}", "of the whole step, pair by pair"),
    ]
    parts = [conditions, format_rows(rows, to_left=True)]
    if share.high - share.low > _WIDE_SHARE:
        parts.append(_say_nothing(f"a share of {share:.0%}"))
    return "\n\n".join(parts)


def describe_buckets(found: Variants) -> str:
    """Return a table of the sizes, and the best one."""
    own, *others = found.ways
    conditions = _describe_pairs("buckets", found, found.ways[own].step_s.confidence)
    table = [("bucket", "step", f"of {own} MiB", "")]
    for name, way in sorted(found.ways.items(), key=lambda each: float(each[0])):
        is_whole = float(name) * (1 << 20) >= found.gradient_bytes
        against = "" if name == own else f"{way.ratio:.3f}"
        table.append(
            (f"{name} MiB", _milliseconds(way.step_s), against, "one bucket holds all" if is_whole else "")
        )
    best = min(others, key=lambda name: found.ways[name].ratio.median, default=own)
    ratio = found.ways[best].ratio
    if not others:
        verdict = "whatever the size, one bucket holds all gradients"
    elif best != own and ratio.high < 1:
        verdict = f"best: bucket_cap_mb={best}, {ratio:.3f} of {own} MiB"
    elif any(found.ways[name].ratio.says_nothing for name in others):
        verdict = _say_nothing(f"a ratio of {ratio:.2f} for {best} MiB")
    else:
        verdict = f"no size is faster than {own} MiB beyond the noise"
    return "\n\n".join([conditions, format_rows(table), verdict])


def describe_dp(found: Variants) -> str:
    """Return threads of one process beside ranks, and what each costs."""
    num, threads, ranks = found.num_ranks, found.ways["threads"], found.ways["ranks"]
    ring = 2 * found.gradient_bytes * (num - 1) / num
    columns: dict[str, list[str]] = {}
    table = [("", f"{num} threads, 1 process", f"{num} ranks")]
    for name, way in zip(("threads", "ranks"), (threads, ranks), strict=True):
        columns[name] = [
            f"{way.samples_per_s:.4g}",
            _milliseconds(way.step_s),
            f"{way.cores:.1f}",
            format_bytes(way.peak_bytes),
        ]
    titles = ("samples/s", "step", "cores in use", "memory of a process")
    table += list(zip(titles, columns["threads"], columns["ranks"], strict=True))
    table.append(
        ("sent per step by", f"replica 0: {format_bytes(threads.moved_bytes)}", f"each: {format_bytes(ring)}")
    )
    speed = ranks.ratio
    verdict = f"a sample on ranks takes {speed:.2f} of the time with threads"
    if speed.says_nothing:
        verdict = _say_nothing(verdict)
    notes = [
        "threads: the batch is cut, and each thread computes with a copy of the parameters. Python runs in",
        "one of them at a time, and parameters and gradients go through replica 0. This is what",
        "nn.DataParallel does on GPUs; on CPU it does nothing, so Paceline does it with threads.",
    ]
    conditions = _describe_pairs("threads of a process against ranks", found, ranks.ratio.confidence)
    return "\n\n".join([conditions, format_rows(table), verdict, "\n".join(notes)])


def _describe_pairs(title: str, found: Variants, confidence: float, each: str = "starts of each") -> str:
    """Return the conditions under which ways were compared."""
    batch = f"{found.samples_per_step:g} samples per step, " if found.samples_per_step else ""
    lines = [
        f"{title}: {format_count(found.num_parameters)} parameters on {found.num_ranks} "
        f"rank{'s' if found.num_ranks > 1 else ''}, {found.device}",
        f"  {batch}{format_bytes(found.gradient_bytes)} of gradients, {_name_threads(found)} per rank",
        f"  {found.num_repeats} {each} of {found.num_steps} steps, alternating; median and "
        f"{confidence:.0%} confidence interval",
        *_warn_of_cores(found, found.num_ranks),
    ]
    return "\n".join(lines)


def _name_threads(found: Variants | Scaling) -> str:
    return f"{found.threads_per_rank} thread{'s' if found.threads_per_rank > 1 else ''}"


def _warn_of_cores(found: Variants | Scaling, num_ranks: int) -> list[str]:
    if found.device != "cpu" or num_ranks * found.threads_per_rank <= found.num_cores:
        return []
    return [
        f"  {num_ranks} ranks of {_name_threads(found)} are more than the {found.num_cores} cores: "
        "they wait for each other"
    ]


def _describe_conditions(scaling: Scaling) -> str:
    first = scaling.points[0]
    model = f"{format_count(scaling.num_parameters)} parameters" if scaling.num_parameters else "a script"
    size = f"{first.samples_per_step:g} samples"
    batch = (
        "unknown samples per step, taken as the same for every rank"
        if not first.samples_per_step
        else f"weak: the samples of a step grow with the ranks, from {size}"
        if scaling.is_weak
        else f"strong: the same {size} of a step, shared out"
    )
    times = (
        "once"
        if scaling.num_repeats == 1
        else f"median of {scaling.num_repeats} repeats ({_confidence(first.samples_per_s)})"
    )
    lines = [
        f"scaling of {model} on {scaling.device}",
        f"  {batch}",
        f"  {_name_threads(scaling)} per rank everywhere, so one rank does not use the whole machine "
        f"({scaling.num_cores} cores)",
        f"  {scaling.num_steps} steps after {scaling.num_warm_up} of warm-up, {times}",
        *_warn_of_cores(scaling, scaling.points[-1].num_ranks),
    ]
    return "\n".join(lines)


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.4g} ms ({spread.low * 1e3:.4g}..{spread.high * 1e3:.4g})"


def _confidence(spread: Spread) -> str:
    return f"{spread.confidence:.0%} confidence interval in brackets"
