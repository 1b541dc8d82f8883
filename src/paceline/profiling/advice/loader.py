"""PL917: the training loop loads its data itself, and workers could do it beside the step.

With workers, a rank's step takes what is left of it, or a batch's loading time divided by the workers if that
is longer. All ranks wait for the slowest of them. Loading that computes needs cores: a step cannot be shorter
than the time for which a rank's threads ran or waited for a core, divided by the rank's share of the cores.
"""

from __future__ import annotations

from statistics import fmean

from paceline.phrases import name_ranks
from paceline.profiling.advice.advice import RecordedJob, SettingAdvice
from paceline.profiling.trace import DATA
from paceline.units import format_seconds

_CHOICES = (1, 2, 4, 8, 16)
# More workers than needed cost memory: the fewest are taken that save this share of the most.
_ENOUGH = 0.95
# For taking a batch from a worker: 0.3 to 1.1 ms on two cores.
_TAKING_NS = 1_000_000


def advise_workers(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice, or `None` if loading is not worth it or the use of cores is not known."""
    inline = [use for use in recorded.uses if use.trace.is_loader_inline]
    if not inline or not all(use.trace.cores for use in inline):
        return None
    loading, rest, least = {}, {}, 0.0
    for use in recorded.uses:
        rank, number = use.trace.rank, len(use.steps)
        own = [row for row in recorded.profile.rows if row.rank == rank]
        loading[rank] = fmean(row.phases.get(DATA, 0) for row in own) if use in inline else 0.0
        rest[rank] = fmean(row.total_ns - sum(row.waiting_ns.values()) for row in own) - loading[rank]
        taken = sum(len(use.list_spans(DATA, step)) for step in use.steps) / number * _TAKING_NS
        if use in inline:
            rest[rank] += min(taken, loading[rank])
            loading[rank] = max(0.0, loading[rank] - taken)
            delay = fmean(row.core_ns for row in own)
            least = max(least, (use.trace.cpu_ns / len(use.trace.steps) + delay) / use.trace.cores)
    before = max(rest[rank] + loading[rank] for rank in rest)

    def predict(workers: int) -> float:
        after = max(least, *(max(rest[rank], loading[rank] / workers) for rank in rest))
        return min(max(loading.values()), before - after)

    saved = {workers: predict(workers) for workers in _CHOICES}
    best = max(saved.values())
    if not recorded.is_much(best):
        return None
    workers = next(number for number in _CHOICES if saved[number] >= _ENOUGH * best)
    saves, step = recorded.predict(saved[workers])
    slowest = max(loading, key=lambda rank: loading[rank])
    return SettingAdvice(
        "PL917",
        where=name_ranks([use.trace.rank for use in inline]),
        setting="num_workers",
        value=workers,
        was=0,
        saves_ns=saves,
        step_ns=step,
        saw=f"the training loop waits while it loads each batch itself, up to "
        f"{format_seconds(loading[slowest] / 1e9)} per step on {name_ranks([slowest])}.",
        rule="Loader workers load the next batches while the step computes.",
        fix=f"Set num_workers={workers} in the DataLoader.",
    )
