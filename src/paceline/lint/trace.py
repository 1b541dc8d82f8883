"""The trace of a simulated rank: a tree of what it did, with the branches that it could not decide."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from paceline.lint.values import RankValue, Value, at_rank


@dataclass(eq=False)
class _Placed:
    node: ast.AST
    path: str
    tokens: dict[Any, list[Any]] = field(default_factory=dict, init=False)  # of the rules

    @property
    def line(self) -> int:
        """The line in the file."""
        return getattr(self.node, "lineno", 0)


@dataclass(eq=False)
class TraceEvent(_Placed):
    """A collective, save, load, step, ... of a witness."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    loops: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Return an entry of `data`, None where it is missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.data.get(name)


@dataclass(eq=False)
class BranchItem(_Placed):
    """A branch on a value that is not known: what each arm would do."""

    taint: int
    arms: list[list[Item]]
    condition: Value | None = None


@dataclass(eq=False)
class LoopItem(_Placed):
    """A loop: one round of its body."""

    taint: int
    body: list[Item]
    count: int | None = None
    is_uneven: bool = False
    is_joined: bool = False


@dataclass(eq=False)
class CallItem(_Placed):
    """A call of a function of the script."""

    body: list[Item]


@dataclass(eq=False)
class ExitItem(_Placed):
    """A return, break, continue or raise."""

    kind: str


@dataclass(eq=False)
class RankItem(_Placed):
    """A place where ranks part: what each group of them does."""

    parts: list[tuple[tuple[int, ...], list[Item]]]


Item: TypeAlias = "TraceEvent | BranchItem | LoopItem | CallItem | ExitItem | RankItem"


def of_rank(value: Any, rank: int) -> Any:
    """Return a rank's part of a trace or of what is in it; what all ranks do alike is shared."""
    if isinstance(value, RankValue):
        return at_rank(value, rank)
    if isinstance(value, (list, tuple)):
        found: list[Any] = []
        for one in value:
            if isinstance(one, RankItem):
                found += [new for ranks, part in one.parts if rank in ranks for new in of_rank(part, rank)]
            else:
                found.append(of_rank(one, rank))
        is_same = len(found) == len(value) and all(map(operator.is_, found, value))
        return value if is_same else type(value)(found)
    fields = value if isinstance(value, dict) else vars(value) if isinstance(value, _Placed) else {}
    new = {name: one for name, old in fields.items() if (one := of_rank(old, rank)) is not old}
    if not new:
        return value
    return {**value, **new} if isinstance(value, dict) else replace(value, **new)


def walk(items: list[Item]) -> list[Item]:
    """Return every item of a tree, in the order of the program."""
    found: list[Item] = []
    for item in items:
        found.append(item)
        if isinstance(item, BranchItem):
            for arm in item.arms:
                found += walk(arm)
        elif isinstance(item, (LoopItem, CallItem)):
            found += walk(item.body)
    return found


def events(items: list[Item], *kinds: str) -> Iterator[TraceEvent]:
    """Yield the events of some kinds, or all."""
    for item in walk(items):
        if isinstance(item, TraceEvent) and (item.kind in kinds or not kinds):
            yield item
