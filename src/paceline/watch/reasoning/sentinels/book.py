"""Collects the facts of ranks by event, and applies the rules once all ranks of an event have reported it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline.codes import read_pages
from paceline.watch.protocol.report import Fact, Frame, SharedPlace, Verdict

# Beginnings of the codes that the linter has, too.
_IN_TEXT = ("PL02", "PL03", "PL040", "PL041", "PL05", "PL826", "PL831")
_MANY_EVENTS = 2048
_MANY_RECENT = 128

Facts = Mapping[int, Fact]
"""The facts of one event, by rank."""


@dataclass(frozen=True)
class Proof:
    """What facts prove.

    Attributes:
        saw: the fact, as a sentence without its end.
        ranks: that are named.
        frames: the line that it happened at.
        what: ranks do at this line.
    """

    code: str
    saw: str
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    what: str


SentinelRule = Callable[[Facts], Proof | None]
"""A pure function of the facts of an event: a proof, or None if they do not prove a mistake."""


class FactBook:
    """The facts of all ranks.

    Attributes:
        recent: the latest facts of this node's ranks on events of several, for the other nodes.

    Args:
        rules: by kind of fact.
        unwanted: codes that are not reported.
    """

    def __init__(self, rules: Mapping[str, Iterable[SentinelRule]], unwanted: Iterable[str] = ()) -> None:
        self.recent: deque[tuple[int, Fact]] = deque(maxlen=_MANY_RECENT)
        self._ranks: set[int] = set()
        self._rules = {kind: tuple(some) for kind, some in rules.items()}
        self._events: OrderedDict[tuple[str, str], dict[int, Fact]] = OrderedDict()
        self._found: dict[str, Proof] = {}
        self._reported = set(unwanted)

    def note_own(self, rank: int, facts: Iterable[Fact]) -> None:
        """Take the facts of a rank of this node."""
        facts = tuple(facts)
        self._ranks.add(rank)
        self.recent.extend((rank, fact) for fact in facts if len(fact.ranks) > 1)
        self.note(rank, facts)

    def note(self, rank: int, facts: Iterable[Fact]) -> None:
        """Take the facts of a rank, which may be another node's and known already."""
        for fact in facts:
            key = fact.kind, fact.event
            event = self._events.setdefault(key, {})
            event[rank] = fact
            if set(fact.ranks) <= event.keys():
                # Only the members: others may have reported an event of the same name.
                members = {r: event[r] for r in fact.ranks} if fact.ranks else event
                for rule in self._rules.get(fact.kind, ()):
                    proof = rule(members)
                    if proof is not None:
                        self._found.setdefault(proof.code, proof)
            while len(self._events) > _MANY_EVENTS:
                self._events.popitem(last=False)

    def read(self) -> list[Verdict]:
        """Return what has been proved since the last call: each code once, by the node of the first rank."""
        new = [
            proof
            for code, proof in self._found.items()
            if code not in self._reported and proof.ranks[0] in self._ranks
        ]
        self._reported |= self._found.keys()
        return [explain(proof) for proof in new]


def explain(proof: Proof) -> Verdict:
    """Return the verdict on a mistake; the job goes on."""
    page = read_pages()[proof.code]
    what = proof.what
    if len(proof.ranks) > 1:
        verb, _, rest = what.partition(" ")
        what = f"{'have' if verb == 'has' else verb.removesuffix('s')} {rest.replace('its own', 'their own')}"
    headline = f"{proof.saw}: {page.title[0].lower()}{page.title[1:]}"
    places = (SharedPlace(proof.ranks, what.rstrip(), proof.frames),)
    more = ("`paceline lint` looks for this before a run.",) if proof.code.startswith(_IN_TEXT) else ()
    return Verdict(proof.code, headline, places, page.why, page.fix, more)
