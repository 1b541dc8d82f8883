"""Lists the messages of a schedule, in one order for all ranks.

NCCL runs the sends and receives of a rank one after the other, in the order in which they are posted, and
matches those of two ranks by their order alone. A receive that waits therefore holds up every send behind it.
All ranks post in one order of all messages, that of their making in a simulation. The first message that has
not arrived is then the next one on both of its ranks, so some message can always move, whether the library
keeps a copy of what is sent or waits for the receiver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from paceline.pipeline.schedule import Action, ActionKind, Schedule
from paceline.pipeline.simulate import simulate

# By name of a weight that several stages use, these stages in order.
Shared = tuple[tuple[str, tuple[int, ...]], ...]


class Payload(StrEnum):
    """The kinds of contents of a message."""

    OUTPUT = "output"  # what a stage made, and what it passes on
    GRADIENT = "gradient"  # of what a stage received
    SHARED = "shared"  # of a weight that an earlier stage uses too


@dataclass(frozen=True, slots=True)
class Message:
    """A message from an action of one stage to an action of another.

    Attributes:
        content: what it carries.
        source, target: stages.
        name: of the shared weight, else "".
    """

    content: Payload
    source: int
    target: int
    microbatch: int
    name: str = ""

    def __str__(self) -> str:
        """Return its words: `the gradient of microbatch 5 from stage 3 to stage 2`."""
        what = {
            Payload.OUTPUT: "the output",
            Payload.GRADIENT: "the gradient",
            Payload.SHARED: f"the gradient of {self.name}",
        }[self.content]
        return f"{what} of microbatch {self.microbatch} from stage {self.source} to stage {self.target}"


def list_results(action: Action, num_stages: int, shared: Mapping[str, Sequence[int]]) -> list[Message]:
    """Return what an action gives to actions of other stages, in the order of sending.

    Args:
        shared: by name of a weight, the stages that use it, in order.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        following = stage + 1 < num_stages
        return [Message(Payload.OUTPUT, stage, stage + 1, microbatch)] if following else []
    if action.kind is ActionKind.WEIGHT:
        return []
    found = [Message(Payload.GRADIENT, stage, stage - 1, microbatch)] if stage else []
    for name, users in sorted(shared.items()):
        if stage in users[1:]:
            found.append(Message(Payload.SHARED, stage, users[users.index(stage) - 1], microbatch, name))
    return found


def list_needs(action: Action, num_stages: int, shared: Mapping[str, Sequence[int]]) -> list[Message]:
    """Return what an action needs from actions of other stages; the arguments are those of `list_results`."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return [Message(Payload.OUTPUT, stage - 1, stage, microbatch)] if stage else []
    if action.kind is ActionKind.WEIGHT:
        return []
    following = stage + 1 < num_stages
    found = [Message(Payload.GRADIENT, stage + 1, stage, microbatch)] if following else []
    for name, users in sorted(shared.items()):
        if stage in users[:-1]:
            found.append(Message(Payload.SHARED, users[users.index(stage) + 1], stage, microbatch, name))
    return found


@lru_cache(maxsize=16)
def list_posted(schedule: Schedule, rank: int, shared: Shared) -> tuple[Message, ...]:
    """Return the messages that a rank exchanges with others, in the order in which it posts them.

    An action takes time, so a message is made after those that its action and the earlier ones of its rank
    need. The order of all messages by the time of their making therefore fits every rank's own order.
    """
    found: list[tuple[float, int, Message]] = []
    for sender, spans in enumerate(simulate(schedule).spans):
        for span in spans:
            for message in list_results(span.action, schedule.num_stages, dict(shared)):
                target = schedule.homes[message.target]
                if target != sender and rank in (sender, target):
                    found.append((span.end, sender, message))
    return tuple(message for *_, message in sorted(found, key=lambda each: each[:2]))


@lru_cache(maxsize=16)
def list_taken(schedule: Schedule, rank: int, shared: Shared) -> Mapping[Message, list[Message]]:
    """Return, by message that a rank receives, what the sender has taken of the rank's own messages by then.

    Only what it has taken since it sent the message before.
    """
    found: dict[Message, list[Message]] = {}
    for sender, own in enumerate(schedule.actions):
        if sender == rank:
            continue
        taken: list[Message] = []
        for action in own:
            needs = list_needs(action, schedule.num_stages, dict(shared))
            taken += [message for message in needs if schedule.homes[message.source] == rank]
            for message in list_results(action, schedule.num_stages, dict(shared)):
                if schedule.homes[message.target] == rank:
                    found[message], taken = taken, []
    return found
