"""Lists what crosses the cuts between stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.errors import PacelineError
from paceline.parallel.context.division import Division
from paceline.parallel.stages.record import ForwardRecord, LearnedTensor


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
