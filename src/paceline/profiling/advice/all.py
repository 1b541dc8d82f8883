"""Applies all rules to a profile."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.profiling.advice.advice import RecordedJob, SettingAdvice
from paceline.profiling.advice.flattening import advise_flattening
from paceline.profiling.advice.lateness import advise_blamed, advise_rarer
from paceline.profiling.advice.lines import advise_lines
from paceline.profiling.advice.loader import advise_workers
from paceline.profiling.advice.reduction import advise_accumulation, advise_no_sync
from paceline.profiling.advice.search import advise_search
from paceline.profiling.analysis import Profile
from paceline.profiling.matching import Meetings, find_meetings
from paceline.profiling.trace import RankTrace

_RULES = (
    advise_workers,
    advise_no_sync,
    advise_flattening,
    advise_search,
    advise_rarer,
)


def find_advice(
    traces: Sequence[RankTrace], profile: Profile, meetings: Meetings | None = None
) -> list[SettingAdvice]:
    """Return the settings worth changing, those that save most first.

    Savings of several settings do not add up: each is of the step as it was recorded.

    Args:
        traces: which `profile` was made from.
        profile: the numbers.
        meetings: what `find_meetings` returns for the traces, if it is known already.
    """
    recorded = RecordedJob(traces, profile, meetings or find_meetings(traces))
    found = [advice for rule in _RULES if (advice := rule(recorded)) is not None]
    found += advise_lines(recorded)
    found += advise_blamed(recorded)
    # A repeated reduction is removed first: then it is known what the one that is left costs.
    if not any(advice.code == "PL918" for advice in found):
        found += [advice for advice in [advise_accumulation(recorded)] if advice is not None]
    return sorted(found, key=lambda advice: -advice.saves_ns)
