"""PL921: a line outside of forward and backward waits in a collective in each step, such as a barrier."""

from __future__ import annotations

from collections import defaultdict

from paceline.profiling.advice.advice import MOST_STEPS, RecordedJob, SettingAdvice
from paceline.profiling.intervals import Coverage, unite
from paceline.units import format_seconds

_BARRIER = "barrier"
_EVERY = 50
_MOST_CALLS = 4
"""More collectives per step at one line are its algorithm, such as averaging parameters, not a metric."""


def advise_lines(recorded: RecordedJob) -> list[SettingAdvice]:
    """Return an advice for each line that waits long enough, the longest first."""
    blocked: dict[tuple[str, str], list[float]] = defaultdict(list)
    steps: dict[tuple[str, str], int] = defaultdict(int)
    for use in recorded.uses:
        phases = Coverage(unite(*use.trace.phases.values()) if use.trace.phases else unite())
        own: dict[tuple[str, str], float] = defaultdict(float)
        for step in use.steps:
            seen: dict[tuple[str, str], int] = defaultdict(int)
            for part in use.list_parts(step.begin_ns, step.end_ns):
                if part.at and not phases.measure(part.issued_ns, part.issued_ns + 1):
                    key = part.operation, part.at
                    seen[key] += 1
                    own[key] += use.served.measure(part.issued_ns, part.end_ns)
            for key, number in seen.items():
                steps[key] += number <= _MOST_CALLS
        for key, time_ns in own.items():
            blocked[key].append(time_ns / len(use.steps))
    found = []
    for key, times in blocked.items():
        if steps[key] < MOST_STEPS * recorded.num_steps * len(recorded.uses):
            continue
        time_ns = recorded.average(times)
        gain = time_ns if key[0] == _BARRIER else time_ns * (1 - 1 / _EVERY)
        if recorded.is_much(gain):
            found.append(_build(recorded, *key, time_ns, gain))
    return sorted(found, key=lambda advice: -advice.saves_ns)


def _build(recorded: RecordedJob, operation: str, at: str, time_ns: float, gain: float) -> SettingAdvice:
    saved, step_ns = recorded.predict(gain)
    is_barrier = operation == _BARRIER
    return SettingAdvice(
        "PL921",
        where=at,
        setting="barrier" if is_barrier else "every",
        value=False if is_barrier else _EVERY,
        was=True if is_barrier else 1,
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"{operation} takes {format_seconds(time_ns / 1e9)} per step, without waiting for late ranks.",
        rule="Nothing is computed meanwhile."
        if not is_barrier
        else "The reduction of gradients already keeps ranks together.",
        fix="Leave the barrier out."
        if is_barrier
        else f"If it is for a log or a metric, collect values on each rank and do this every {_EVERY} steps.",
    )
