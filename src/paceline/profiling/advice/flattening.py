"""PL922: a line sums gradients tensor by tensor, each time as expensive as one sum of all.

A collective costs a constant time and a time per byte, which are fitted to those recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from paceline.profiling.advice.advice import MOST_STEPS, RankUse, RecordedJob, SettingAdvice, fit_cost
from paceline.profiling.trace import OPTIMIZER, TracedCollective
from paceline.units import format_bytes

_SUM = "all_reduce"
_LEAST_CALLS = 8
"""Fewer collectives are no many small ones."""
_MOST_BYTES = 1 << 20


def advise_flattening(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice to sum what one line sums tensor by tensor in one collective."""
    blocked: dict[str, list[float]] = defaultdict(list)
    lines: dict[str, list[list[TracedCollective]]] = defaultdict(list)
    for use in recorded.uses:
        own: dict[str, float] = defaultdict(float)
        for step in use.steps:
            for at, parts in _group_lines(use, step.begin_ns, step.end_ns).items():
                if _is_many(parts):
                    lines[at].append(parts)
                    own[at] += sum(use.blocked.measure(part.issued_ns, part.end_ns) for part in parts)
        for at, time_ns in own.items():
            blocked[at].append(time_ns / len(use.steps))
    found = []
    for at, groups in lines.items():
        if len(groups) < MOST_STEPS * recorded.num_steps * len(recorded.uses):
            continue
        _, per_byte = _fit(recorded, groups)
        total = fmean(sum(part.num_bytes or 0 for part in parts) for parts in groups)
        count = fmean(len(parts) for parts in groups)
        # Waiting included: ranks that are late by chance in each of many calls are so in one of them less.
        time_ns = recorded.average(blocked[at])
        left = max(time_ns / count, per_byte * total)
        found.append((time_ns - left, at, round(count), total))
    gain, at, count, total = max(found, default=(0.0, "", 0, 0.0))
    if not at or not recorded.is_much(gain):
        return None
    saved, step_ns = recorded.predict(gain)
    return SettingAdvice(
        "PL922",
        where=at,
        setting="collectives per step",
        value=1,
        was=count,
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"this line sums {format_bytes(round(total))} per step in {count} collectives.",
        rule="Each small collective takes about as long as one that sums all of them.",
        fix="Sum one flat tensor in place of them: torch.cat of the flattened ones, then one all_reduce.",
    )


def _is_many(parts: Sequence[TracedCollective]) -> bool:
    sizes = [part.num_bytes for part in parts]
    return len(parts) >= _LEAST_CALLS and None not in sizes and max(s or 0 for s in sizes) <= _MOST_BYTES


def _fit(recorded: RecordedJob, groups: Sequence[Sequence[TracedCollective]]) -> tuple[float, float]:
    sizes = [part.num_bytes or 0 for parts in groups for part in parts]
    times = [time_ns for parts in groups for time_ns in recorded.measure_services(parts)]
    return fit_cost(sizes, times)


def _group_lines(use: RankUse, begin_ns: int, end_ns: int) -> dict[str, list[TracedCollective]]:
    """Return the sums issued between backward and optimizer, by line."""
    found: dict[str, list[TracedCollective]] = defaultdict(list)
    spans = use.phases.get(OPTIMIZER)
    for part in use.list_parts(begin_ns, end_ns):
        is_in = spans is not None and spans.measure(part.issued_ns, part.issued_ns + 1)
        if part.at and part.operation == _SUM and is_in:
            found[part.at].append(part)
    return found
