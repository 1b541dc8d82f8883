"""Reads SLURM's forms of a time, and checks the time that ranks get to save."""

from __future__ import annotations

import re

from paceline.errors import PacelineError

# SLURM's limit for --signal (sbatch's manual).
_MOST_LEAD_S = 65535
_LEAST_LEAD_S = 30
# SLURM may send the signal this much earlier (sbatch's manual).
_EARLY_S = 60
# The launcher kills ranks that have not left by then, so that the batch script can still requeue the job.
_SCRIPT_S = 15

_FORM = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def read_time_s(text: str) -> int:
    """Return the seconds of a time: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    found = _FORM.fullmatch(text)
    total_s = 0
    if found is not None:
        days, *parts = found.groups()
        numbers = [int(part) for part in parts if part is not None]
        if days is None and len(numbers) < 3:
            numbers = [0, *numbers]  # without days and hours, the first number is minutes
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        total_s = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total_s < 1:
        raise PacelineError(
            "PL366",
            saw=f"--time {text}.",
            rule="It is a time limit in one of SLURM's forms: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.",
            fix="Use for example --time 24:00:00.",
        )
    return total_s


def check_grace(grace_s: int, limit_s: int | None) -> int:
    """Return the seconds that ranks have to save and leave, of those between the warning and the end.

    Args:
        grace_s: seconds between the warning and the end of the job.
        limit_s: the time limit in seconds, or `None`.
    """
    if not _LEAST_LEAD_S <= grace_s <= _MOST_LEAD_S or (
        limit_s is not None and grace_s + _EARLY_S >= limit_s
    ):
        limit = "" if limit_s is None else f" with a time limit of {limit_s} s"
        raise PacelineError(
            "PL366",
            saw=f"--grace-s {grace_s}{limit}.",
            rule=f"Ranks are asked to save that many seconds before the job ends: {_LEAST_LEAD_S} to "
            f"{_MOST_LEAD_S}, and {_EARLY_S} s less than the time limit, because SLURM may signal that "
            "early.",
            fix=_propose(grace_s, limit_s),
        )
    return grace_s - _SCRIPT_S


def _propose(grace_s: int, limit_s: int | None) -> str:
    usual = f"{_LEAST_LEAD_S} to {_MOST_LEAD_S}, at least twice the time of a save"
    if limit_s is None or not _LEAST_LEAD_S <= grace_s <= _MOST_LEAD_S:
        return f"Use --grace-s with {usual}."
    shorter_s = limit_s - _EARLY_S - 1
    other = f" or --grace-s {shorter_s} at most" if shorter_s >= _LEAST_LEAD_S else ""
    return f"Use --time {(grace_s + _EARLY_S) // 60 + 1} (minutes) or more{other}."
