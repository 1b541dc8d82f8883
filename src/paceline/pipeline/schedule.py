"""`Schedule`: what each rank of a pipeline does with which microbatch, in order.

A model is cut into consecutive *stages*, numbered from 0. A rank holds one or several of them. Its work on a
microbatch is a forward and a backward per stage. The backward may be divided: the gradient of the stage's
input, which the stage before waits for, and later the gradients of the weights (Qi et al. 2023, "Zero Bubble
Pipeline Parallelism", section 2).

The text form has a line per rank and a word per action, `stage KIND microbatch`: `0F3` is the forward of
microbatch 3 on stage 0. Words are separated by commas or blanks, and `#` begins a comment. torch's CSV files
of schedules (`torch.distributed.pipelining`) without messages are of this form too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.errors import PacelineError

_WORD = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")


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
        name: of the order, or of the file that it is from.
        num_microbatches: of a step.
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

    def needs(self, action: Action) -> list[Action]:
        """Return the actions whose results an action uses, each in the kinds that this schedule has."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD:
            return [Action(ActionKind.FORWARD, stage - 1, microbatch)] if stage else []
        if action.kind is ActionKind.WEIGHT:
            return [Action(ActionKind.INPUT, stage, microbatch)]
        found = [Action(ActionKind.FORWARD, stage, microbatch)]
        if stage + 1 < self.num_stages:
            found.append(Action(ActionKind.BACKWARD, stage + 1, microbatch))
        return found

    def __str__(self) -> str:
        """Return the text form."""
        return "\n".join(",".join(map(str, own)) for own in self.actions) + "\n"


def read_schedule(text: str, name: str) -> Schedule:
    """Read a schedule from its text form; `check.py` checks whether it works.

    Args:
        text: a line per rank.
        name: of the file, for messages.

    Raises:
        PacelineError: PL470 for text that is not of this form, PL471 for a stage on two ranks or on none.
    """
    actions: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if words:
            actions.append(tuple(_read_word(word, f"{name}, line {number}") for word in words))
    if not actions:
        raise PacelineError(
            "PL470",
            saw=f"{name} has no actions.",
            rule="A schedule has a line of actions for each rank.",
            fix="Write for example 0F0,0F1,0B0,0B1 as the line of the rank with stage 0.",
        )
    homes = _find_homes(actions, name)
    num_microbatches = 1 + max(action.microbatch for own in actions for action in own)
    return Schedule(name, num_microbatches, homes, tuple(actions))


def _read_word(word: str, where: str) -> Action:
    match = _WORD.fullmatch(word)
    if match is None:
        raise PacelineError(
            "PL470",
            saw=f"{where}: {word!r}.",
            rule="An action is a stage, a kind (F forward, B backward, I input's gradient, W weights' "
            "gradients) and a microbatch.",
            fix="Write for example 0F3 for the forward of microbatch 3 on stage 0.",
        )
    return Action(ActionKind(match[2]), int(match[1]), int(match[3]))


def _find_homes(actions: Sequence[Sequence[Action]], name: str) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            home = homes.setdefault(action.stage, rank)
            if home != rank:
                raise PacelineError(
                    "PL471",
                    saw=f"{name}: stage {action.stage} is on ranks {home} and {rank}.",
                    rule="A stage and its weights are on one rank.",
                    fix=f"Put all actions of stage {action.stage} into one line.",
                )
    missing = [stage for stage in range(max(homes) + 1) if stage not in homes]
    if missing:
        raise PacelineError(
            "PL471",
            saw=f"{name}: there is a stage {max(homes)}, and no action of stage {missing[0]}.",
            rule="The stages of a model are numbered from 0 without gaps.",
            fix=f"Add the actions of stage {missing[0]}, or renumber the stages.",
        )
    return tuple(homes[stage] for stage in range(len(homes)))
