"""Compares two profiles: what takes longer, by how much, and whether the steps vary too much to decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.profiling.analysis import Profile, RankStep
from paceline.profiling.trace import BACKWARD, COLLECTION, DATA, FORWARD, HOST, OPTIMIZER, READING

_NUM_DRAWS = 2000
_CONFIDENCE = 0.95
# A quantity below this in both profiles is left out.
_LEAST_NS = 100_000


@dataclass(frozen=True)
class ComparedTime:
    """A time per step in two profiles; nanoseconds.

    Attributes:
        name: such as `step` or `waiting`.
        before_ns, after_ns: medians over the steps, of the mean over ranks; of the step, the longest rank's.
        low_ns, high_ns: the interval of the difference of the medians, with 95% confidence, as far as steps
            vary independently.
    """

    name: str
    before_ns: float
    after_ns: float
    low_ns: float
    high_ns: float

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low_ns > 0 or self.high_ns < 0


@dataclass(frozen=True)
class ProfileDifference:
    """The difference of two profiles.

    Attributes:
        rows: the step first, then its parts.
        remarks: facts that limit what can be compared.
    """

    rows: tuple[ComparedTime, ...]
    remarks: tuple[str, ...]

    @property
    def is_slower(self) -> bool:
        """Whether steps take longer in the second profile."""
        return self.rows[0].low_ns > 0


_VALUES: dict[str, Callable[[RankStep], int]] = {
    **{
        name: (lambda row, name=name: row.phases.get(name, 0))  # type: ignore[misc]
        for name in (DATA, FORWARD, BACKWARD, OPTIMIZER, READING, COLLECTION, HOST)
    },
    "compute": lambda row: row.compute_ns,
    "communication": lambda row: row.comm_ns,
    "exposed": lambda row: row.exposed_ns,
    "waiting": lambda row: sum(row.waiting_ns.values()),
}


def compare(before: Profile, after: Profile) -> ProfileDifference:
    """Return the times of two profiles and their differences."""
    rows = [_compare("step", [[p.step_ns(step) for step in p.steps] for p in (before, after)])]
    for name, value in _VALUES.items():
        means = [_list_means(profile, value) for profile in (before, after)]
        if max(max(each) for each in means) >= _LEAST_NS:
            rows.append(_compare(name, means))
    return ProfileDifference(tuple(rows), tuple(_list_remarks(before, after)))


def _list_means(profile: Profile, value: Callable[[RankStep], int]) -> list[float]:
    sums = dict.fromkeys(profile.steps, 0)
    for row in profile.rows:
        sums[row.step] += value(row)
    return [total / len(profile.ranks) for total in sums.values()]


def _compare(name: str, values: Sequence[Sequence[float]]) -> ComparedTime:
    random = np.random.default_rng(0)
    drawn = [
        np.median(random.choice(np.array(each, dtype=np.float64), (_NUM_DRAWS, len(each))), axis=1)
        for each in values
    ]
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(drawn[1] - drawn[0], [tail, 100 - tail])
    first, second = (float(np.median(each)) for each in values)
    return ComparedTime(name, first, second, float(low), float(high))


def _list_remarks(before: Profile, after: Profile) -> list[str]:
    found = []
    if before.world_size != after.world_size:
        found.append(
            f"The first recording is of {before.world_size} ranks, the second of {after.world_size}."
        )
    fewest = min(len(before.steps), len(after.steps))
    if fewest < 5:
        found.append(f"One has {fewest} steps only: the intervals are too narrow.")
    return found
