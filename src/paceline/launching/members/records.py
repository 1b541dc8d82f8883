"""Records of other launchers: their own messages, and a leader's entries for its followers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.errors import PacelineError
from paceline.launching.members.world import Member, NodeWorld, world_from_json

Message = dict[str, Any]
Address = tuple[str, int]
Ballot = tuple[int, str]
Role = Literal["seeking", "following", "leading"]


class Agent(Protocol):
    """The part of this launcher that starts and ends ranks; called in the thread of the links."""

    def formed(self, world: NodeWorld) -> None:
        """Join a new world that contains this node."""

    def over(self, reason: str, *, lost: bool) -> None:
        """End the round; `lost` if a node was lost, so that the ranks cannot go on."""

    def closed(self, *, failed: bool) -> None:
        """Take note of the end of the job."""

    def failed(self, error: PacelineError) -> None:
        """Stop waiting for a round, with this error."""


@dataclass(frozen=True)
class Terms:
    """The settings that all nodes of a job share.

    Attributes:
        job: the job's name, `--rdzv-id`.
        least, most: `--nnodes`.
        code: identifies what the ranks run: versions, and file names with a digest of each file.
        nproc: ranks per node; nodes may differ, which is only reported.
        folder: number by which the disk knows the script's working folder; "" if that does not matter.
    """

    job: str
    least: int
    most: int
    code: Mapping[str, str] = field(default_factory=dict)
    nproc: int = 0
    folder: str = ""


@dataclass
class Peer:
    """A leader's entry for one of its followers.

    Attributes:
        heard_s: time of its last message.
        offer: its ports, set while its agent waits for a round.
        is_done: whether its ranks have succeeded.
        beats: the number of its last beat.
    """

    member: Member
    link: int
    heard_s: float
    offer: Message | None = None
    is_done: bool = False
    beats: int = 0


@dataclass(frozen=True)
class Lost:
    """A member that has gone."""

    member: Member
    why: str
    at_s: float
    is_silent: bool = False


@dataclass
class Proposal:
    """A world that the leader has proposed, and the members that have not accepted it yet.

    Attributes:
        is_recorded: whether the witness was asked to record it.
    """

    ballot: Ballot
    world: NodeWorld
    missing: set[str] = field(default_factory=set)
    is_recorded: bool = False


@dataclass(frozen=True)
class Answer:
    """The latest message of another launcher about its own state."""

    member: Member
    role: Role
    world: NodeWorld | None
    pending: Mapping[Ballot, NodeWorld]
    dead: frozenset[str]
    leader: Member | None
    is_firm: bool
    is_closed: bool
    has_left: bool
    at_s: float


def read_answer(message: Message, now: float) -> Answer:
    """Parse a launcher's message about its own state.

    Raises:
        ValueError, KeyError, TypeError: the message is something else.
    """
    leader = message["leader"]
    return Answer(
        Member(**message["member"]),
        message["role"],
        world_from_json(message["world"]),
        read_pending(message["pending"]),
        frozenset(message["dead"]),
        None if leader is None else Member(**leader),
        bool(message["is_firm"]),
        bool(message["is_closed"]),
        bool(message["has_left"]),
        now,
    )


def read_pending(values: Iterable[Any]) -> dict[Ballot, NodeWorld]:
    """Return the proposals that a launcher has accepted and whose commit it has not seen."""
    found = {(int(number), str(key)): world_from_json(value) for number, key, value in values}
    return {ballot: world for ballot, world in found.items() if world is not None}
