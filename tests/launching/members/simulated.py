"""A job's launchers in one thread: a store in memory, links to it that fail, and a clock that is only told.

Each node keeps the rules of torch's rendezvous and of `elastic/members.py`: it ends its ranks when the round
is over, leaves the round, joins the next one, and completes it. A step needs all ranks of a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.launching.members.pulse import Pulse, read_record
from paceline.launching.members.record import JobNode, Record, Terms, to_text
from paceline.launching.members.store import StoreError
from paceline.launching.members.waits import Waits

WAITS = Waits(detect_s=3.0)
TICK_S = 0.1
LATE_S = 3.0
"""The mean time after which a call that is late takes effect."""


@dataclass
class Disk:
    """What the store holds."""

    record: bytes | None = None
    beats: dict[str, bytes] = field(default_factory=dict)


class Link:
    """One launcher's access to the store.

    Attributes:
        fault: "cut": nothing arrives; "lost answers": calls take effect and fail; "late": they fail, and take
            effect some time later, in any order; "": none.
        late: the calls that have yet to take effect.
    """

    name = "memory"

    def __init__(self, disk: Disk) -> None:
        self._disk, self.fault = disk, ""
        self.late: list[Callable[[], object]] = []

    def _reach(self, effect: Callable[[], object] = lambda: None) -> None:
        if self.fault == "late":
            self.late.append(effect)
        if self.fault in ("cut", "late"):
            raise StoreError("no route")

    def _answer(self) -> None:
        if self.fault == "lost answers":
            raise StoreError("timed out")

    def beat(self, key: str, value: str) -> None:
        def store() -> None:
            self._disk.beats[key] = value.encode()

        self._reach(store)
        store()
        self._answer()

    def read_beats(self, keys: list[str]) -> list[bytes | None]:
        self._reach()
        self._answer()
        return [self._disk.beats.get(key) for key in keys]

    def end_beats(self, key: str) -> None:
        def remove() -> None:
            self._disk.beats.pop(key, None)

        self._reach(remove)
        remove()
        self._answer()

    def read(self) -> bytes | None:
        self._reach()
        self._answer()
        return self._disk.record

    def replace(self, number: int, before: bytes | None, after: str) -> bool:
        def change() -> bool:
            is_same = self._disk.record == before
            if is_same:
                self._disk.record = after.encode()
            return is_same

        self._reach(change)
        is_same = change()
        self._answer()
        return is_same


class Simulated:
    """One node, with one rank.

    Attributes:
        rank_round: the round whose rank runs here; 0: none does.
        stopped: whether the launcher stands still; its rank and the keeper go on.
    """

    def __init__(self, disk: Disk, number: int, start: int, terms: Terms) -> None:
        self.link, self.terms = Link(disk), terms
        self.me = JobNode(f"key{number}-{start}", f"node{number}", f"10.0.0.{number}")
        self.pulse = Pulse(self.link, self.me, WAITS, self)
        self.formed_round, self.formed = 0, frozenset[str]()
        self.is_meeting, self.rank_round, self.stopped, self.dead = True, 0, False, False
        self.until_s, self.next_s, self.enough_s = 0.0, 0.0, 0.0
        self.is_over = False

    def missed(self, trouble: str) -> None:
        pass

    def heard(self, record: Record, sent_s: float) -> None:
        self.until_s = sent_s + WAITS.held_s
        if not self.is_meeting and (
            record.round != self.formed_round or set(record.numbers) != self.formed or record.waiting
        ):
            self.is_over = True

    def keep(self, now: float) -> None:
        """Do as the keeper, which needs no launcher."""
        if self.rank_round and now > self.until_s:
            self.rank_round = 0
            self.is_over = True

    def turn(self, now: float) -> None:
        if self.stopped or self.dead or now < self.next_s:
            return
        self.next_s = now + WAITS.beat_s
        try:
            self.pulse.turn(now)
            if self.is_over:
                self.rank_round, self.is_over, self.is_meeting = 0, False, True
                self._change(lambda record: record.numbers.pop(self.me.key, None) is not None)
            if self.is_meeting:
                self._meet(now)
        except StoreError:
            pass

    def _meet(self, now: float) -> None:
        def join(record: Record) -> bool:
            key = self.me.key
            record.terms, record.nodes[key] = self.terms, self.me
            if record.is_complete:
                is_new = key not in record.numbers and key not in record.waiting
                record.waiting += [key] if is_new else []
                return is_new
            if key not in record.numbers:
                record.numbers[key] = 0
                record.waiting = [other for other in record.waiting if other != key]
                return True
            here = set(record.numbers)
            if len(here) < self.terms.least or not {*record.expected, *record.waiting} <= here:
                return False
            record.is_complete, record.expected = True, sorted(here)
            record.numbers = {name: number for number, name in enumerate(sorted(here))}
            return True

        for _ in range(3):
            record = self._change(join)
        if record.is_complete and self.me.key in record.numbers:
            self.formed_round, self.formed = record.round, frozenset(record.numbers)
            self.is_meeting, self.rank_round = False, record.round

    def _change(self, change: object) -> Record:
        while True:
            text = self.link.read()
            record = read_record(text)
            if not change(record):  # type: ignore[operator]
                return record
            if record.is_complete and not record.numbers:
                record.is_complete, record.round = False, record.round + 1
            record.nodes = {k: n for k, n in record.nodes.items() if k in {*record.numbers, *record.waiting}}
            record.number += 1
            if self.link.replace(record.number, text, to_text(record)):
                return record


class World:
    """The nodes, the store, and the steps that they take."""

    def __init__(self, count: int, seed: int = 0, least: int = 1) -> None:
        self.disk, self.terms, self.now = Disk(), Terms(least, count), 0.0
        self.random = random.Random(seed)
        self.count, self.starts = count, 0
        self.nodes = [self.make(number) for number in range(count)]
        self.old: list[Simulated] = []
        self.steps: list[tuple[float, int, int]] = []

    def make(self, number: int) -> Simulated:
        self.starts += 1
        return Simulated(self.disk, number, self.starts, self.terms)

    def kill(self, number: int, *, with_rank: bool = True) -> None:
        """Kill a launcher; its rank ends with it, or is left to the keeper."""
        node = self.nodes[number]
        node.dead = True
        if with_rank:
            node.rank_round = 0

    def start(self, number: int) -> None:
        """Start a launcher again; a rank that an earlier one has left runs until the keeper ends it."""
        self.old.append(self.nodes[number])
        self.nodes[number] = self.make(number)

    def run(self, seconds: float) -> None:
        """Let time pass; raise AssertionError if two worlds could take a step at one time."""
        end_s = self.now + seconds
        while self.now < end_s:
            self.now += TICK_S
            order = list(self.nodes)
            self.random.shuffle(order)
            for link in [node.link for node in [*self.nodes, *self.old]]:
                for effect in list(link.late):
                    if self.random.random() < TICK_S / LATE_S:
                        link.late.remove(effect)
                        effect()
                        self.check()
            for node in order:
                node.turn(self.now)
                self.check()
            for node in [*self.nodes, *self.old]:
                node.keep(self.now)
            self.check()

    def check(self) -> None:
        worlds = self.worlds()
        assert len(worlds) <= 1, f"two worlds at {self.now:.1f} s: {worlds}"
        if worlds:
            ((round, formed),) = worlds
            assert not self.steps or round >= self.steps[-1][1], "rounds never go back"
            self.steps.append((self.now, round, len(formed)))

    def worlds(self) -> list[tuple[int, frozenset[str]]]:
        """Return the rounds all of whose ranks run: those that can take a step."""
        ranks: dict[tuple[int, frozenset[str]], int] = {}
        for node in [*self.nodes, *self.old]:
            if node.rank_round:
                place = node.rank_round, node.formed
                ranks[place] = ranks.get(place, 0) + 1
        return [place for place, number in ranks.items() if number == len(place[1])]

    def size(self) -> int:
        """Return the number of nodes that train."""
        return max((len(formed) for _, formed in self.worlds()), default=0)
