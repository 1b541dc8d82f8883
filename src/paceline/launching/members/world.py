"""Members of a job, the worlds that they form, and the rule by which a part of a world may go on.

The rule is dynamic voting with a tie-break (Jajodia and Mutchler, "Dynamic voting algorithms for maintaining
the consistency of a replicated database", 1990). The next world needs a majority of the last one. Exactly
half is enough with the first member. Members that are known to be dead do not count on either side: a dead
member stays dead, so two disjoint halves cannot both fulfil the rule, whatever each of them knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """One launcher, from its start to its end.

    Attributes:
        key: a random name; a launcher that is started again has another one.
        name: of its machine.
        address, port: where it listens.
    """

    key: str
    name: str
    address: str
    port: int

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"


@dataclass(frozen=True)
class NodeWorld:
    """The nodes of one round.

    Attributes:
        round: counts from 1.
        members: in the order of their numbers; number 0 has the store where the ranks meet.
        store_port: of the launchers' store on number 0.
        master_port: of the ranks' store; the same unless the ranks make their own.
    """

    round: int
    members: tuple[Member, ...]
    store_port: int = 0
    master_port: int = 0

    def find(self, key: str) -> int:
        """Return a member's number, or -1."""
        return next((i for i, member in enumerate(self.members) if member.key == key), -1)


@dataclass(frozen=True)
class Waits:
    """All waits of the members of a job; the short ones are multiples of `detect_s`.

    Attributes:
        detect_s: a member is lost if its beat number has not grown for this long.
        join_s: longest wait for missing members.
        last_call_s: wait of the first world for more members, once it has the fewest that it needs.
    """

    detect_s: float = 3.0
    join_s: float = 600.0
    last_call_s: float | None = None

    @property
    def beat_s(self) -> float:
        """The time between two beats."""
        return self.detect_s / 6

    @property
    def probe_s(self) -> float:
        """The time in which a launcher has to answer."""
        return self.detect_s / 2

    @property
    def first_call_s(self) -> float:
        """The time for which the first world waits for more members."""
        return 3 * self.detect_s if self.last_call_s is None else self.last_call_s

    def __str__(self) -> str:
        return (
            f"a node is lost after {self.detect_s:g} s without a beat (--detect-s); it beats every "
            f"{self.beat_s:g} s, the first round waits {self.first_call_s:g} s for more nodes, and a round "
            f"waits {self.join_s:g} s for missing ones (--join-timeout)"
        )


def has_quorum(
    world: NodeWorld, present: Collection[str], dead: Collection[str], *, has_endpoint: bool = False
) -> bool:
    """Return whether some members may decide what follows a world.

    Args:
        world: the last world.
        present: keys of the members that decide.
        dead: keys of members that are known to have ended.
        has_endpoint: whether the launcher at the single endpoint is among them. If no member of that world
            is alive, this alone counts.
    """
    living = [member.key for member in world.members if member.key not in dead]
    here = [key for key in living if key in present]
    if not living:
        return has_endpoint
    return 2 * len(here) > len(living) or (2 * len(here) == len(living) and living[0] in here)


def order_of(world: NodeWorld | None, member: Member) -> tuple[int, str]:
    """Return a key that sorts members by their numbers in a world; those outside of it come last."""
    number = -1 if world is None else world.find(member.key)
    return (number if number >= 0 else 1 << 30, member.key)


def rank_leader(world: NodeWorld | None, leader: Member, *, is_firm: bool) -> tuple[int, bool, int, str]:
    """Return a key by which the greatest of several leaders goes on.

    Args:
        world: the last one that the leader knows.
        leader: the leader.
        is_firm: whether a quorum follows it.
    """
    number, key = order_of(world, leader)
    return (0 if world is None else world.round, is_firm, -number, key)


def world_to_json(world: NodeWorld | None) -> dict[str, Any] | None:
    """Return a world as JSON-able values."""
    return None if world is None else asdict(world)


def world_from_json(value: Mapping[str, Any] | None) -> NodeWorld | None:
    """Return the world that `world_to_json` has converted.

    Raises:
        ValueError, KeyError, TypeError: the value is something else.
    """
    if value is None:
        return None
    members = tuple(Member(**member) for member in value["members"])
    return NodeWorld(int(value["round"]), members, int(value["store_port"]), int(value["master_port"]))
