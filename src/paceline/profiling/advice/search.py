"""PL920: DDP searches the graph for unused parameters before each backward, and need not.

The search walks through the graph of the forward. After the last gradient, ranks also sum which parameters
each has used: one more collective, of four bytes per parameter tensor.
"""

from __future__ import annotations

from collections import Counter

from paceline.phrases import name_ranks
from paceline.profiling.advice.advice import RankUse, RecordedJob, SettingAdvice
from paceline.profiling.trace import BACKWARD
from paceline.units import format_seconds

# The setting costs nothing, so a smaller share is worth it.
_LEAST = 0.02
_BYTES_PER_TENSOR = 4


def advise_search(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice, or `None` if no DDP searches, or if it must."""
    reducers = [reducer for use in recorded.uses for reducer in use.trace.reducers]
    searching = [reducer for reducer in reducers if reducer.finds_unused]
    if not searching or not all(reducer.is_constant for reducer in searching):
        return None
    gain = recorded.average([_measure(recorded, use) for use in recorded.uses])
    if not recorded.is_much(gain, _LEAST):
        return None
    saved, step_ns = recorded.predict(gain)
    is_used = not any(reducer.unused_bytes for reducer in searching)
    used = "all parameters were used" if is_used else "the same parameters were unused"
    setting, value = ("find_unused_parameters", False) if is_used else ("static_graph", True)
    return SettingAdvice(
        "PL920",
        where=name_ranks(recorded.profile.ranks),
        setting=setting,
        value=value,
        was=not value,
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"DDP searches for unused parameters, {format_seconds(gain / 1e9)} per step with the collective "
        f"on them, and {used} in every backward so far.",
        rule="Without the search, a backward that leaves other parameters out ends in an error or a hang.",
        fix=f"If the model always uses the same parameters, give DistributedDataParallel {setting}={value}.",
    )


def _measure(recorded: RecordedJob, use: RankUse) -> float:
    """Return a rank's time per step for its searches and for the collective on what was used."""
    sizes = Counter(_BYTES_PER_TENSOR * reducer.num_tensors for reducer in use.trace.reducers)
    total = 0
    for step in use.steps:
        total += use.searches.measure(step.begin_ns, step.end_ns)
        for span in use.list_spans(BACKWARD, step):
            parts = list(use.list_parts(*span))
            for part, time_ns in zip(parts, recorded.measure_services(parts), strict=True):
                if part.num_bytes in sizes and part is _find_last(parts, sizes):
                    total += min(time_ns, use.transfer.measure(part.end_ns - time_ns, part.end_ns))
    return total / len(use.steps)


def _find_last(parts: list, sizes: Counter[int]) -> object:  # type: ignore[type-arg]
    """Return the last one issued that has the size of the collective on unused parameters."""
    return next((part for part in reversed(parts) if part.num_bytes in sizes), None)
