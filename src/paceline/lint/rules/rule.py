"""A rule, what it gets and what it returns."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from paceline.lint.trace import Item, LoopItem, TraceEvent, events, walk
from paceline.lint.values import Value, WitnessPlace

Level = Literal["error", "warning", "advice"]


@dataclass
class WitnessTrace:
    """The actions of one witness.

    Attributes:
        place: where it ran.
        items: the trace.
        reads: the variables of a launcher that it read.
        spawns: whether the script starts its ranks itself.
        all: every witness, those of ranks 0, 1 and 8 first; a rule gets that of rank 0.
    """

    place: WitnessPlace
    items: list[Item]
    reads: set[str]
    spawns: bool
    all: list[WitnessTrace] = field(default_factory=list)

    @cached_property
    def all_items(self) -> list[Item]:
        """The events, branches, loops and calls, in the order of the program."""
        return list(walk(self.items))

    @cached_property
    def all_events(self) -> list[TraceEvent]:
        """The events in the order of the program."""
        return [item for item in self.all_items if isinstance(item, TraceEvent)]

    @cached_property
    def rounds(self) -> list[tuple[LoopItem, list[TraceEvent]]]:
        """Each loop with the events in it."""
        return [(item, list(events(item.body))) for item in self.all_items if isinstance(item, LoopItem)]

    @property
    def loops(self) -> list[LoopItem]:
        """The loops."""
        return [loop for loop, _ in self.rounds]

    def events(self, *kinds: str) -> Iterator[TraceEvent]:
        """Yield the events of some kinds, in the order of the program."""
        return (event for event in self.all_events if event.kind in kinds)


@dataclass(frozen=True)
class Spot:
    """A place in the source, and what was seen there; the code, if the check has several."""

    node: ast.AST
    path: str
    saw: str
    code: str = ""


def at(item: Item, saw: str, code: str = "") -> Spot:
    """Return a finding at the place of something in a trace."""
    return Spot(item.node, item.path, saw, code)


Check = Callable[[WitnessTrace], Iterator[Spot]]


# The level of each code, and the checks with their first code.
RULES: dict[str, Level] = {}
CHECKS: list[tuple[str, Check]] = []


def rule(codes: str, level: Level = "error") -> Callable[[Check], Check]:
    """Register a check."""

    def register(check: Check) -> Check:
        RULES.update(dict.fromkeys(codes.split(), level))
        CHECKS.append((codes.split()[0], check))
        return check

    return register


def name_of(node: ast.AST | None) -> str:
    """Return the source of an expression, where it is short."""
    text = ast.unparse(node) if node is not None else ""
    return text if len(text) <= 40 else text[:37] + "..."


def is_averaged(model: Value) -> bool:
    """Return whether ranks average gradients of a model, each from batches of its own."""
    return model.kind in ("ddp", "fsdp") or model.fact("sharded") == "fully_shard"


def trains(witness: WitnessTrace) -> set[Value]:
    """Return the loaders, models and wrappers that went into a backward."""
    found: set[Value] = set()
    for event in witness.events("backward"):
        found |= event.data["deps"]
    return found
