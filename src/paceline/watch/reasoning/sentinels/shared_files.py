"""Rules on files that ranks of a node use at the same time, and on states of random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from paceline.watch.reasoning.sentinels.book import Facts, Proof

_NEAR_S = 5.0


def check_writers(facts: Facts) -> Proof | None:
    """Report a file that ranks write from the same line, with no collective between.

    Silent where they take turns, and for files of several nodes.
    """
    for (rank, one), (other, two) in combinations(facts.items(), 2):
        for mine, theirs in _pair(one.values["uses"], two.values["uses"]):
            if mine[0] == theirs[0] == "save" and mine[4] == theirs[4]:
                name = os.path.basename(one.values["path"])
                saw = f"ranks {rank} and {other} have written {name} at the same time"
                return Proof("PL041", saw, (rank, other), one.frames, "writes it")
    return None


def check_reader(facts: Facts) -> Proof | None:
    """Report a file that a rank reads while another writes it, with no collective between.

    Silent before the first backward.
    """
    for (rank, one), (other, two) in combinations(facts.items(), 2):
        for mine, theirs in _pair(one.values["uses"], two.values["uses"]):
            if {mine[0], theirs[0]} == {"save", "load"} and mine[1] > 0:
                reader, writer = (rank, other) if mine[0] == "load" else (other, rank)
                name = os.path.basename(one.values["path"])
                saw = f"rank {reader} reads {name} while rank {writer} writes it"
                return Proof("PL042", saw, (reader,), facts[reader].frames, "reads it")
    return None


def _pair(mine: list[Any], theirs: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the uses of a file by two ranks between the same collectives.

    A use is what was done, after how many backward passes and collectives, when, from where, and whether it
    replaced a file.
    """
    for one in mine:
        for other in theirs:
            if one[2] >= 0 and one[1:3] == other[1:3] and abs(one[3] - other[3]) < _NEAR_S:
                yield one, other


def check_overwritten(facts: Facts) -> Proof | None:
    """Advise against a checkpoint that replaces the one before in place."""
    for rank, fact in facts.items():
        saves = [use for use in fact.values["uses"] if use[0] == "save"]
        if len(saves) > 1 and saves[-1][5]:
            name = os.path.basename(fact.values["path"])
            return Proof("PL832", f"rank {rank} writes {name} again", (rank,), fact.frames, "writes it")
    return None


def advise_keys(facts: Facts) -> Proof | None:
    """Advise against saving the state of a wrapper, which a plain model cannot load."""
    rank, fact = next(iter(facts.items()))
    saw = f'the keys in {os.path.basename(fact.event)} of rank {rank} begin with "module."'
    return Proof("PL040", saw, (rank,), fact.frames, "saves them")


def check_random_state(facts: Facts) -> Proof | None:
    """Report ranks that had different random numbers and set one and the same state.

    Silent where they had one seed before.
    """
    values = [fact.values for fact in facts.values()]
    if len(values) < 2 or len({one["after"] for one in values}) > 1:
        return None
    if not all(len({one[name] for one in values}) == len(values) for name in ("seed", "before")):
        return None
    fact = next(iter(facts.values()))
    saw = "ranks with different random numbers have all set one and the same state"
    return Proof("PL830", saw, tuple(facts), fact.frames, "sets it")
