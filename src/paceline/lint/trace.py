"""The trace of a simulated rank: a tree of what it did, with the branches that it could not decide."""

from __future__ import annotations

import ast
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


def list_of_rank(items: list[Item], rank: int) -> list[Item]:
    """Return what a rank does; what all ranks do alike is shared."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, RankItem):
            for ranks, part in item.parts:
                found += list_of_rank(part, rank) if rank in ranks else []
        elif isinstance(item, BranchItem):
            arms = [list_of_rank(arm, rank) for arm in item.arms]
            same = all(new is old for new, old in zip(arms, item.arms, strict=True))
            condition = at_rank(item.condition, rank) if item.condition is not None else None
            taint = item.taint if condition is item.condition else condition.taint
            same = same and condition is item.condition
            found.append(item if same else replace(item, arms=arms, condition=condition, taint=taint))
        elif isinstance(item, (LoopItem, CallItem)):
            body = list_of_rank(item.body, rank)
            found.append(item if body is item.body else replace(item, body=body))
        elif isinstance(item, TraceEvent):
            data = {name: _of_rank(value, rank) for name, value in item.data.items()}
            same = all(value is item.data[name] for name, value in data.items())
            found.append(item if same else replace(item, data=data))
        else:
            found.append(item)
    same = len(found) == len(items) and all(new is old for new, old in zip(found, items, strict=True))
    return items if same else found


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, RankValue):
        return at_rank(value, rank)
    if isinstance(value, list) and value and isinstance(value[0], _Placed):
        return list_of_rank(value, rank)
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # handlers
        found = [(handler, list_of_rank(arm, rank), ends) for handler, arm, ends in value]
        return value if all(new[1] is old[1] for new, old in zip(found, value, strict=True)) else found
    return value


def walk(items: list[Item]) -> Iterator[Item]:
    """Yield every item of a tree, in the order of the program."""
    for item in items:
        yield item
        if isinstance(item, BranchItem):
            for arm in item.arms:
                yield from walk(arm)
        elif isinstance(item, (LoopItem, CallItem)):
            yield from walk(item.body)


def events(items: list[Item], *kinds: str) -> Iterator[TraceEvent]:
    """Yield the events of some kinds, or all."""
    for item in walk(items):
        if isinstance(item, TraceEvent) and (item.kind in kinds or not kinds):
            yield item


def loops(items: list[Item]) -> Iterator[LoopItem]:
    """Yield the loops."""
    yield from (item for item in walk(items) if isinstance(item, LoopItem))
