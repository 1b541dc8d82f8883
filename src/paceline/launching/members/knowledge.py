"""Holds one launcher's state and its conclusions about the job; `membership.py` acts on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict

from paceline.errors import PacelineError
from paceline.launching.members import reports
from paceline.launching.members.contacts import Contacts, MemberLinks, place_of
from paceline.launching.members.records import (
    Address,
    Agent,
    Answer,
    Ballot,
    Lost,
    Message,
    Peer,
    Proposal,
    Role,
    Terms,
)
from paceline.launching.members.testimony import Testimony
from paceline.launching.members.witness import WitnessLine
from paceline.launching.members.world import (
    Member,
    NodeWorld,
    Waits,
    has_quorum,
    order_of,
    rank_leader,
    world_to_json,
)

_NEVER = float("-inf")


class Knowledge:
    """The state of one launcher in its job.

    Attributes:
        rests_until_s: time of the next tick, unless there is news before; in the past: `Wire` decides.

    Args:
        me: this launcher.
        terms: settings that all nodes of the job share.
        waits: all waits.
        links: the connections to others.
        agent: the part of this launcher that starts ranks.
        now: the monotonic clock.
        endpoints: addresses at which a launcher without a job asks for it.
        founds: whether this launcher starts the job if no other launcher knows of it.
        witness: the record of the rounds, or None.
        noted: the last world in the note of an earlier launcher on this machine, or None.
    """

    def __init__(
        self,
        me: Member,
        terms: Terms,
        waits: Waits,
        links: MemberLinks,
        agent: Agent,
        now: float,
        *,
        endpoints: Sequence[Address],
        founds: bool,
        witness: WitnessLine | None = None,
        noted: NodeWorld | None = None,
    ) -> None:
        self.me, self.terms, self.waits = me, terms, waits
        self._links, self._agent, self._founds = links, agent, founds
        self._contacts, self._endpoints = Contacts(me, waits, links, endpoints), list(endpoints)
        self._testimony = Testimony(witness, waits, now)
        self.role: Role = "seeking"
        self.world = self._noted = noted
        self._pending: dict[Ballot, NodeWorld] = {}
        self._ballot = 0
        self._dead: set[str] = set()
        self._is_over = noted is not None
        self._is_closed = self._is_done = self._has_left = False
        self._offer: Message | None = None
        self._offered_s = self._began_s = self._arrived_s = self._beat_s = self._up_heard_s = now
        self._led_since_s = now
        self.rests_until_s = _NEVER
        self._leader: Member | None = None
        self._up: int | None = None
        # Time of this launcher's last contact with its world; until then, the others cannot have gone on
        # without it.
        self._contact_s = self._not_before_s = self._seeks_until_s = _NEVER
        self._weak_since_s: float | None = None
        self._peers: dict[int, Peer] = {}
        self._lost: dict[str, Lost] = {}
        self._proposal: Proposal | None = None
        self._beats, self._refusals = 0, set[str]()
        self._refused = set[str]()
        if noted is not None:  # this launcher has the port of the one before it
            self._dead |= {member.key for member in noted.members if place_of(member) == place_of(me)}
            self._seeks_until_s = now + waits.probe_s

    # ---- messages about this launcher

    def _describe(self) -> Message:
        return {
            "job": self.terms.job,
            "member": asdict(self.me),
            "role": self.role,
            "world": world_to_json(self.world),
            "pending": [[*ballot, world_to_json(world)] for ballot, world in self._pending.items()],
            "dead": sorted(self._dead),
            "leader": None if self._leader is None else asdict(self._leader),
            "is_firm": self.role == "leading" and self._has_quorum(self._present()),
            "is_closed": self._is_closed,
            "has_left": self._has_left,
        }

    def _report(self, now: float) -> Message:
        return reports.describe_job(
            self._describe(),
            self.terms,
            self.world,
            [Peer(self.me, 0, now, beats=self._beats), *self._peers.values()],
            self._lost,
            now,
            is_over=self._is_over,
        )

    def _known(self) -> list[Member]:
        worlds = [*([self.world] if self.world is not None else []), *self._pending.values()]
        return [member for world in worlds for member in world.members]

    def _explain_lateness(self, now: float) -> PacelineError | None:
        """Return why a round has not come in time, or `None` while there is time."""
        if self._offer is None:
            return None
        present = self._present()
        has_quorum = self.role == "following" or self._has_quorum(present)
        # Those that have ended do not count for the quorum, so it is not missing them.
        named = present if has_quorum else present | self._dead
        return reports.explain_lateness(
            reports.Lateness(
                now - self._offered_s,
                is_alone=self.world is None and self.role == "seeking",
                # It may know the world of the job that refuses it.
                is_stranger=self.role == "seeking" and not self._is_member(),
                has_quorum=has_quorum,
                refusals=self._refusals,
                endpoints=self._contacts.endpoints,
                witness=self._testimony.trouble,
                is_witness_wrong=self._testimony.is_wrong,
                refused=self._refused,
            ),
            *(self.waits, self.terms, self.world, named, self._lost, now),
        )

    def _runs(self, key: str) -> bool:
        """Return whether a member takes part in a round that is not over."""
        return self.world is not None and not self._is_over and self.world.find(key) >= 0

    def _is_member(self) -> bool:
        """Return whether this launcher is in the last world."""
        return self.world is not None and self.world.find(self.me.key) >= 0

    def _comes_before(self, other: Member) -> bool:
        """Return whether this launcher is before another one in the order of the last world."""
        return order_of(self.world, self.me) < order_of(self.world, other)

    def _comes_after(self, other: Answer) -> bool:
        """Return whether another leader has priority over this one."""
        mine = rank_leader(self.world, self.me, is_firm=self._has_quorum(self._present()))
        return rank_leader(other.world, other.member, is_firm=other.is_firm) > mine

    def _present(self) -> set[str]:
        return {self.me.key, *(peer.member.key for peer in self._peers.values())}

    def _is_noted(self) -> bool:
        """Return whether the note of an earlier launcher is this one's only source for the last world."""
        return self._noted is not None and self.world is self._noted

    def _begins(self) -> bool:
        """Return whether this launcher starts the job, or restarts one whose members are all dead."""
        if self.world is None:
            return self._founds
        return self._founds and all(member.key in self._dead for member in self._known())

    def _has_quorum(self, present: Collection[str]) -> bool:
        worlds = [*([self.world] if self.world is not None else []), *self._pending.values()]
        return all(has_quorum(w, present, self._dead, has_endpoint=self._founds) for w in worlds)

    def _may_decide(self, present: Collection[str], now: float) -> bool:
        """Return whether the launchers `present` may form the next world, if the witness agrees."""
        return self._has_quorum(present) or self._testimony.may_take_over(self.world, present, now)

    def _followed_links(self) -> list[int]:
        """Return the links over which this launcher beats."""
        return [*self._peers, *([self._up] if self.role == "following" and self._up is not None else [])]
