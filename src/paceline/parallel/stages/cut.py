"""Chooses where a model is cut, and lists what crosses each cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from paceline.errors import PacelineError
from paceline.parallel.context.division import Division
from paceline.parallel.stages.record import ForwardRecord, LearnedTensor

# Stages begin at one of at most so many places: the time to choose grows with their square.
_MOST_PLACES = 256


@dataclass(frozen=True)
class StageCut:
    """A record divided into stages.

    Attributes:
        record: of one forward.
        starts: the first segment of every stage, and one more for the end.
        divisions: by stretch of blocks that cp divides, the positions of each of its ranks.
    """

    record: ForwardRecord
    starts: tuple[int, ...]
    divisions: tuple[Division, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.starts) - 1

    def find_stage(self, segment: int) -> int:
        """Return the stage that a segment belongs to."""
        return max(stage for stage in range(self.num_stages) if self.starts[stage] <= segment)

    @cached_property
    def crossings(self) -> list[list[LearnedTensor]]:
        """By stage, the values that it receives: made before it, and used in it or after it."""
        found: list[list[LearnedTensor]] = [[]]
        for start in self.starts[1:-1]:
            found.append(
                [
                    tensor
                    for tensor in self.record.learned.values()
                    if tensor.segment < start and any(use >= start for use in tensor.uses)
                ]
            )
        found.append([])
        return found

    def check_writes(self) -> None:
        """Raise PL483 if a stage changes in place what another one made or uses."""
        for made, segment, module in self.record.writes:
            if self.find_stage(self.record.learned[made].segment) != self.find_stage(segment):
                raise changed_error(
                    f"{module or 'the model'} changes in place a tensor that an earlier stage made."
                )
        for name, segments in self.record.buffers.items():
            users = segments | self.record.buffer_users.get(name, set())
            if segments and len(set(map(self.find_stage, users))) > 1:
                raise changed_error(f"a stage changes the buffer {name}, which another stage uses.")


def changed_error(saw: str) -> PacelineError:
    """Return the error for a change in place that pp cannot follow."""
    return PacelineError(
        "PL483",
        saw=saw,
        rule="Under pp, a stage gets a copy of what earlier stages made, buffers are not sent, and forwards "
        "of several microbatches run before the first backward.",
        fix="Use the operation that returns a new tensor, for example x + y in place of x += y, and compute "
        "with buffer.clone() after changing a buffer.",
    )


def find_starts(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the cut into consecutive stages whose most expensive stage costs least.

    Args:
        costs: by segment; the first one is what comes before the first block.
        num_stages: at most the number of segments.

    Returns:
        The first segment of each stage, and the number of segments.
    """
    num_segments = len(costs)
    assert num_segments >= num_stages
    if num_segments > _MOST_PLACES >= num_stages:
        # A cell that is called at every position has many. Neighbours are tried as one.
        places = [number * num_segments // _MOST_PLACES for number in range(_MOST_PLACES + 1)]
        joined = [sum(costs[start:end]) for start, end in pairwise(places)]
        return tuple(places[start] for start in find_starts(joined, num_stages))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the end of a part: (the largest cost, the sum of squares, the starts). The squares make cuts even
    # where the largest cost leaves a choice.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [
        (sums[end], sums[end] ** 2, (0,)) if end else None for end in range(num_segments + 1)
    ]
    for stage in range(1, num_stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (num_segments + 1)
        for end in range(stage + 1, num_segments + 1):
            choices = []
            for start in range(stage, end):
                before = best[start]
                if before is not None:
                    own = sums[end] - sums[start]
                    choices.append((max(before[0], own), before[1] + own**2, (*before[2], start)))
            following[end] = min(choices) if choices else None
        best = following
    found = best[num_segments]
    assert found is not None
    return (*found[2], num_segments)
