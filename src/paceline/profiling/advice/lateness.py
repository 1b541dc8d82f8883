"""PL913 and PL923: what a late rank does longer than the others, and work that some steps have on top."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from paceline.phrases import name_ranks
from paceline.profiling.advice.advice import RecordedJob, SettingAdvice
from paceline.profiling.delays import CoreTime
from paceline.profiling.intervals import as_spans, unite
from paceline.profiling.lines import add_samples
from paceline.profiling.trace import (
    BACKWARD,
    COLLECTION,
    FORWARD,
    HOST,
    OPTIMIZER,
    CodePlace,
    RankTrace,
    divide_time,
)
from paceline.units import format_seconds

_RARER = 10
_LEAST_EXTRA = 0.25
"""Of the median step: a step has work on top from there on."""
_LEAST_STEPS = 2


def advise_blamed(recorded: RecordedJob) -> list[SettingAdvice]:
    """Return what to change on the ranks that are blamed."""
    profile = recorded.profile
    shares: dict[tuple[int, str], int] = defaultdict(int)
    for blame in profile.blames:
        kind = _KINDS.get(blame.phase)
        if kind is not None:
            shares[blame.rank, kind] += blame.gain_ns
    found = []
    for (rank, kind), gain in shares.items():
        setting, value, was, fix = _MOVES[kind]
        part = 1 - 1 / len(profile.ranks) if kind == _WORK else 1 - 1 / _RARER if kind == _RARE else 1.0
        saved, step_ns = recorded.predict(gain * part)
        first = next(b for b in profile.blames if b.rank == rank and _KINDS.get(b.phase) == kind)
        where = first.place
        found.append(
            SettingAdvice(
                "PL913",
                where=name_ranks([rank]) if where is None else f"{name_ranks([rank])}, {where}",
                setting=setting,
                value=value,
                was=was,
                saves_ns=saved,
                step_ns=step_ns,
                saw=f"the others wait for it {format_seconds(gain / 1e9)} per step.",
                rule="All ranks of a collective wait for the last one.",
                fix=fix,
                cause=(rank, first.phase),
            )
        )
    return sorted(found, key=lambda advice: -advice.saves_ns)


_WORK, _RARE, _COLLECT = "work", "rare", "collection"
_KINDS = {FORWARD: _WORK, BACKWARD: _WORK, HOST: _RARE, OPTIMIZER: _RARE, COLLECTION: _COLLECT}
_MOVES: dict[str, tuple[str, int | bool | str, int | bool | str, str]] = {
    _WORK: ("work per rank", "equal", "unequal", "Divide the work of a step evenly over the ranks."),
    _RARE: ("every", _RARER, 1, f"If it can be done every {_RARER} steps, do it then only."),
    _COLLECT: ("gc.disable", True, False, "Call gc.freeze() after building the model, and gc.disable()."),
}


def advise_rarer(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice to do less often what makes single steps longer, such as saving."""
    found = []
    for use in recorded.uses:
        steps = use.steps
        waits = use.waiting
        hosts = [row.phases[HOST] for row in recorded.profile.rows if row.rank == use.trace.rank]
        cores = CoreTime(use.trace.scheduling)  # a rank without a core runs no code
        hosts = [
            host - waits.measure(step.begin_ns, step.end_ns) - cores.measure_delay(step.begin_ns, step.end_ns)
            for host, step in zip(hosts, steps, strict=True)
        ]
        usual, length = median(hosts), median(step.end_ns - step.begin_ns for step in steps)
        extra = {
            step.number: host - usual
            for host, step in zip(hosts, steps, strict=True)
            if host - usual >= _LEAST_EXTRA * length
        }
        if _LEAST_STEPS <= len(extra) < len(steps) / 2:
            found.append((sum(extra.values()) / len(steps), use.trace, extra))
    cost, trace, extra = max(found, key=lambda each: each[0], default=(0.0, None, {}))
    gain = cost * (1 - 1 / _RARER)
    if trace is None or not recorded.is_much(gain):
        return None
    saved, step_ns = recorded.predict(gain)
    place = _find_place(trace, set(extra))
    each = sum(extra.values()) / len(extra)
    return SettingAdvice(
        "PL923",
        where=name_ranks([trace.rank]) if place is None else f"{name_ranks([trace.rank])}, {place}",
        setting="every",
        value=f"{_RARER} times as many steps",
        was=f"{len(extra)} of {recorded.num_steps} steps",
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"{len(extra)} of {recorded.num_steps} steps run {format_seconds(each / 1e9)} more Python code.",
        rule="Work of some steps, such as saving or evaluating, makes all ranks wait.",
        fix=f"Do it a {_RARER}th as often, or in the background.",
    )


def _find_place(trace: RankTrace, numbers: set[int]) -> CodePlace | None:
    divided = divide_time(trace, unite(as_spans([])))
    times, _ = add_samples(trace, divided, HOST, numbers)
    return max(times, key=lambda place: times[place]) if times else None
