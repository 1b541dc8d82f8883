"""The trace of a simulated rank: a tree of what it did, with the branches that it could not decide."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.lint.values import Value


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


Item: TypeAlias = "TraceEvent | BranchItem | LoopItem | CallItem | ExitItem"


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
