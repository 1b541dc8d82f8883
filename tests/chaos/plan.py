"""Draws from the seed what happens to each start."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paceline.recipe.layout import Layout
from tests.chaos.faults import KINDS
from tests.chaos.setting import Case

# How often each process is the victim, where the instant is one of the clock.
_VICTIMS = {
    "rank 0": 4,
    "another rank": 4,
    "launcher": 5,
    "loader worker": 4,
    "keeper": 2,
    "fork server": 2,
    "pump": 1,
    "resource tracker": 1,
    "everything": 1,
}
_VICTIMS_IN_A_SAVE = {"rank 0": 6, "all ranks": 2, "launcher": 2, "another rank": 2, "everything": 1}
# Pipelines are killed in every start: which stage dies, and when, is what they add.
_VICTIMS_OF_PIPELINES = {"rank 0": 2, "another rank": 4, "launcher": 1, "everything": 1}
_DAMAGES = ("flip a bit", "cut a file", "remove a file")


@dataclass(frozen=True)
class Plan:
    """The actions on one start.

    Attributes:
        when: `"start"`: at an instant since the launch; `"training"`: since its first step; `"save"`: by
            a fault in saving; `"never"`.
        victim: who is killed.
        delay: when, as a share of what is expected of that time; may be a little over 1.
        fault: of `faults.KINDS`, for `"save"`.
        save: in which save of the start.
        place: where in it, as a share of its operations, bytes or files.
        damage: done to the newest checkpoint before this start, where there is another one.
        nproc: ranks, where each start draws its own number.
        layout: of a case with several, in turn.
    """

    when: str
    victim: str
    delay: float
    fault: str
    save: int
    place: float
    damage: str | None
    nproc: int
    layout: str = ""


class Plans:
    """Deals plans: kinds from decks, so that every kind comes within a few dozen starts."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._num_layouts = 0
        self._victims_of_pipelines = _Deck(self._chance, _VICTIMS_OF_PIPELINES)
        self._kills_in_a_save = _Deck(self._chance, {kind: 1 for kind in KINDS if kind.startswith("kill")})
        self._whens = _Deck(self._chance, {"start": 3, "training": 8, "save": 9})
        self._victims = _Deck(self._chance, _VICTIMS)
        self._victims_in_a_save = _Deck(self._chance, _VICTIMS_IN_A_SAVE)
        self._faults = _Deck(self._chance, dict.fromkeys(KINDS, 1) | {"kill before an operation": 3})
        self._damages = _Deck(self._chance, dict.fromkeys(_DAMAGES, 1) | {"": 18})

    def deal(self, case: Case) -> Plan:
        """Return the next start's plan."""
        nproc, num_workers = case.nproc, case.num_workers
        when = self._whens.deal()
        if case.layouts and when == "start":
            when = "training"
        layout = ""
        if case.layouts:
            layout = case.layouts[self._num_layouts % len(case.layouts)]
            self._num_layouts += 1
            nproc = Layout.parse(layout).fewest_ranks
        ranks = self._chance.randint(1, 4) if nproc is None else nproc
        absent = {"another rank"} if ranks == 1 else set()
        absent |= set() if num_workers else {"loader worker"}
        faults = self._kills_in_a_save if case.layouts else self._faults
        fault = faults.deal() if when == "save" else ""
        if fault == "kill in the copy" and not case.asynchronous:
            fault = "kill in a write"
        victims = self._victims_of_pipelines if case.layouts else self._victims
        victim = (self._victims_in_a_save if when == "save" else victims).deal()
        return Plan(
            when=when,
            victim="rank 0" if victim in absent else victim,
            delay=self._chance.uniform(0.0, 0.6 if case.layouts else 1.05),
            fault=fault,
            save=self._chance.choice((1, 1, 2, 3)),
            place=self._chance.random(),
            damage=self._damages.deal() or None,
            nproc=ranks,
            layout=layout,
        )


class _Deck:
    def __init__(self, chance: random.Random, cards: dict[str, int]) -> None:
        self._chance = chance
        self._all = [name for name, count in cards.items() for _ in range(count)]
        self._left: list[str] = []

    def deal(self) -> str:
        if not self._left:
            self._left = self._chance.sample(self._all, len(self._all))
        return self._left.pop()
