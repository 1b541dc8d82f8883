"""Asks other launchers who they are, again and again, and keeps their answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from paceline.launching.members.records import Address, Answer, Message
from paceline.launching.members.world import Member, Waits

_NEVER = float("-inf")


class MemberLinks(Protocol):
    """The connections to other launchers."""

    def dial(self, address: str, port: int) -> int:
        """Begin to connect, and return the link."""

    def send(self, link: int, message: Message) -> None:
        """Send a message."""

    def send_all(self, links: Iterable[int], message: Message) -> None:
        """Send the same message on several links."""

    def close(self, link: int) -> None:
        """Close a link, after its messages."""


def place_of(member: Member) -> Address:
    """Return where a member listens."""
    return member.address, member.port


class Contacts:
    """The addresses of other launchers, the questions under way, and the latest answers.

    Attributes:
        answers: by the key of the launcher that gave them.
    """

    def __init__(self, me: Member, waits: Waits, links: MemberLinks, endpoints: Sequence[Address]) -> None:
        self._me, self._waits, self._links = me, waits, links
        self.endpoints = list(endpoints)
        self.answers: dict[str, Answer] = {}
        self._asked: dict[int, tuple[Address, float]] = {}
        self._asked_s: dict[Address, float] = {}
        self._heard_of: dict[Address, float] = {}
        self._own = {place_of(me)}

    def ask(
        self, members: Iterable[Member], every_s: float, now: float, *, not_at: Collection[Address] = ()
    ) -> None:
        """Ask at the endpoints, at the places of members, and at places that were heard of lately."""
        self._heard_of = {
            place: at_s for place, at_s in self._heard_of.items() if now - at_s < 4 * self._waits.detect_s
        }
        busy = {place for place, _ in self._asked.values()} | self._own | set(not_at)
        for place in dict.fromkeys([*self.endpoints, *map(place_of, members), *self._heard_of]):
            if place not in busy and now - self._asked_s.get(place, _NEVER) >= every_s:
                self._asked_s[place] = now
                self._asked[self._links.dial(*place)] = place, now

    def is_asked(self, link: int) -> bool:
        """Return whether a link was opened for a question."""
        return link in self._asked

    def finish(self, link: int) -> Address | None:
        """Forget a question; return where it was asked."""
        place, _ = self._asked.pop(link, (None, 0.0))
        return place

    def take(self, link: int, answer: Answer) -> None:
        """Keep a launcher's message about its own state, from a question or an answer."""
        place = self._asked[link][0] if link in self._asked else None
        if answer.member.key == self._me.key:
            if place is not None:
                self._own.add(place)  # the endpoint is this launcher
            return
        self.answers[answer.member.key] = answer
        for member in (answer.member, answer.leader):
            if member is not None and member.key != self._me.key:
                self._heard_of[place_of(member)] = answer.at_s

    def fresh(self, now: float) -> list[Answer]:
        """Return the answers that are still true, as far as can be known."""
        fresh_s = self._waits.probe_s + self._waits.beat_s
        return [a for a in self.answers.values() if now - a.at_s <= fresh_s and not a.is_closed]

    def give_up_late(self, now: float) -> None:
        """Close links on which no answer came."""
        for link, (_, since_s) in list(self._asked.items()):
            if now - since_s > self._waits.probe_s:
                del self._asked[link]
                self._links.close(link)
