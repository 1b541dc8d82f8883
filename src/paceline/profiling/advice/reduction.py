"""PL918 and PL912: gradients are reduced more often than necessary.

Microbatches of one step need one reduction. Where a single one costs much, two steps can share it.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from paceline.phrases import name_ranks
from paceline.profiling.advice.advice import LEAST_SAVING, MOST_STEPS, RankUse, RecordedJob, SettingAdvice
from paceline.profiling.trace import BACKWARD, TracedStep
from paceline.units import format_seconds

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_SHARDED = "reduce_scatter"


def advise_no_sync(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice against reducing in each of several backwards of a step."""
    saves, counts, is_sharded = [], Counter[int](), False
    for use in recorded.uses:
        exposed, num_repeated = 0, 0
        for step in use.steps:
            repeated = _list_repeated(use, step)
            if repeated:
                num_repeated += 1
                counts[len(repeated)] += 1
                exposed += sum(use.exposed.measure(*span) for span in repeated[:-1])
                is_sharded |= any(part.operation == _SHARDED for part in use.list_parts(*repeated[0]))
        if num_repeated < MOST_STEPS * recorded.num_steps:
            return None
        saves.append(exposed / len(use.steps))
    gain = recorded.average(saves)
    if not recorded.is_much(gain):
        return None
    saved, step_ns = recorded.predict(gain)
    number = counts.most_common(1)[0][0]
    call = "model.set_requires_gradient_sync(False)" if is_sharded else "with model.no_sync():"
    return SettingAdvice(
        "PL918",
        where=name_ranks(recorded.profile.ranks),
        setting="set_requires_gradient_sync" if is_sharded else "no_sync",
        value=True,
        was=False,
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"gradients are reduced in each of the {number} backwards of a step; in all but the last one, "
        f"{format_seconds(gain / 1e9)} per step are exposed communication.",
        rule="Microbatches of one optimizer step need one reduction, of the sum of their gradients.",
        fix=f"Run all but the last microbatch under `{call}`, forward included.",
    )


def _list_repeated(use: RankUse, step: TracedStep) -> list[tuple[int, int]]:
    """Return the backwards of a step if there are several that all reduce the same; else none."""
    spans = use.list_spans(BACKWARD, step)
    kinds = [
        Counter(
            (part.group, part.operation, part.num_bytes)
            for part in use.list_parts(*span)
            if part.operation in _REDUCTIONS
        )
        for span in spans
    ]
    is_same = len(spans) > 1 and bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)
    return spans if is_same else []


def advise_accumulation(recorded: RecordedJob) -> SettingAdvice | None:
    """Return the advice to take the samples of two steps in one, if reducing them costs much."""
    exposed = []
    for use in recorded.uses:
        spans = [span for step in use.steps for span in use.list_spans(BACKWARD, step)]
        if not any(part.operation in _REDUCTIONS for span in spans for part in use.list_parts(*span)):
            return None
        exposed.append(sum(use.transfer.measure(*span) for span in spans) / len(use.steps))
    gain = fmean(exposed) / 2
    if not recorded.is_much(gain, 2 * LEAST_SAVING):
        return None
    saved, step_ns = recorded.predict(gain)
    return SettingAdvice(
        "PL912",
        where=name_ranks(recorded.profile.ranks),
        setting="accumulation",
        value=2,
        was=1,
        saves_ns=saved,
        step_ns=step_ns,
        saw=f"reducing gradients takes {format_seconds(2 * gain / 1e9)} per step without any computation.",
        rule="Its time does not depend on the number of samples.",
        fix="Communicate less often: take the samples of two steps in one, by a larger microbatch or by two "
        "with one reduction. The optimizer then steps half as often.",
    )
