"""`Schedule`: what each rank of a pipeline does with which microbatch, in order.

A model is cut into consecutive *stages*, numbered from 0. A rank holds one or several of them. Its work on a
microbatch is a forward and a backward per stage. The backward may be divided: the gradient of the stage's
input, which the stage before waits for, and later the gradients of the weights (Qi et al. 2023, "Zero Bubble
Pipeline Parallelism", section 2).

An action is written `stage KIND microbatch`: `0F3` is the forward of microbatch 3 on stage 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property


class ActionKind(StrEnum):
    """A kind of work."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients
    INPUT = "I"  # the gradient of the stage's input
    WEIGHT = "W"  # the gradients of its weights, after INPUT


KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradient of the input",
    ActionKind.WEIGHT: "gradients of the weights",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank.

    Attributes:
        kind: forward, backward, or a half of a backward.
        stage: a part of the model, numbered from its beginning.
        microbatch: a number within the step, from 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        """Its words: `the forward of microbatch 3 on stage 0`."""
        return f"the {KIND_NAMES[self.kind]} of microbatch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks for one step.

    Attributes:
        homes: by stage, the rank that holds it.
        actions: by rank, in order.
    """

    name: str
    num_microbatches: int
    homes: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return len(self.homes)

    def list_stages(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        return [stage for stage, home in enumerate(self.homes) if home == rank]

    def keep_first(self, num_microbatches: int) -> Schedule:
        """Return the same order with the first microbatches alone."""
        if num_microbatches >= self.num_microbatches:
            return self
        actions = tuple(tuple(a for a in own if a.microbatch < num_microbatches) for own in self.actions)
        return replace(self, num_microbatches=num_microbatches, actions=actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is divided into the gradients of inputs and of weights."""
        return any(action.kind is ActionKind.WEIGHT for own in self.actions for action in own)

    @cached_property
    def waits(self) -> tuple[tuple[tuple[Action, int, tuple[tuple[int, bool], ...]], ...], ...]:
        """By rank, each action with the number of its result, and the results that it uses.

        Each of these has its number, and whether it comes from another rank. The two kinds of backward have
        one number, because others wait for the gradient of the input; nobody waits for result 0.
        """

        def number(stage: int, microbatch: int, *, is_forward: bool) -> int:
            return 1 + 2 * (stage * self.num_microbatches + microbatch) + is_forward

        def find(rank: int, action: Action) -> tuple[Action, int, tuple[tuple[int, bool], ...]]:
            stage, microbatch, is_forward = action.stage, action.microbatch, action.kind is ActionKind.FORWARD
            if action.kind is ActionKind.WEIGHT:
                return action, 0, ((number(stage, microbatch, is_forward=False), False),)
            used = [(stage - 1, True)] if is_forward else [(stage, True), (stage + 1, False)]
            needed = tuple(
                (number(at, microbatch, is_forward=way), self.homes[at] != rank)
                for at, way in used
                if 0 <= at < self.num_stages
            )
            return action, number(stage, microbatch, is_forward=is_forward), needed

        return tuple(tuple(find(rank, action) for action in own) for rank, own in enumerate(self.actions))
