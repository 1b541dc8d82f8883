"""Applies all rules to a profile."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.profiling.advice.advice import RecordedJob, SettingAdvice
from paceline.profiling.advice.lateness import advise_blamed, advise_rarer
from paceline.profiling.advice.loader import advise_workers
from paceline.profiling.analysis import Profile
from paceline.profiling.matching import Meetings, find_meetings
from paceline.profiling.trace import RankTrace


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
    found = [advice for rule in (advise_workers, advise_rarer) if (advice := rule(recorded)) is not None]
    found += advise_blamed(recorded)
    return sorted(found, key=lambda advice: -advice.saves_ns)
