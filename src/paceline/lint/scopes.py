"""Modules, functions, classes and calls in progress of a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from paceline.lint.canonical import canonical
from paceline.lint.values import UNKNOWN, Taint, Value, join, of_ranks, unknown

# A table, a key, and the value that was there or is.
Change: TypeAlias = tuple[dict[str, Any], str, Any]


@dataclass(eq=False)
class Module:
    """A parsed file and its names."""

    path: str
    tree: ast.Module
    names: dict[str, Value] = field(default_factory=dict)


class ScriptFrame:
    """A call in progress: its names, and those of the functions around it."""

    def __init__(self, names: dict[str, Value], module: Module, outer: ScriptFrame | None = None) -> None:
        self.names = names
        self.module = module
        self.outer = outer
        self.returns: list[Value] = []
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.taint = Taint.NONE  # of the conditions under which a part of the calls has returned
        self.pending: list[list[Change]] = []  # of paths that have left a loop or it
        self.is_class = False


@dataclass(eq=False)
class Function:
    """A function of the script."""

    node: ast.AST
    frame: ScriptFrame
    module: Module


@dataclass(eq=False)
class Class:
    """A class of the script."""

    node: ast.ClassDef
    names: dict[str, Value]
    bases: list[Value]
    module: Module

    def lineage(self) -> Iterator[Class]:
        """Yield the class and its bases that are of the script."""
        yield self
        for base in self.bases:
            if base.kind == "class":
                yield from base.ref.lineage()

    def library_bases(self) -> Iterator[str]:
        """Yield the dotted names of the bases that are of libraries."""
        for one in self.lineage():
            for base in one.bases:
                if base.kind == "lib":
                    yield canonical(base.ref)
                elif base.kind != "class":
                    yield "?"

    def find(self, name: str) -> Value | None:
        """Return a member."""
        for one in self.lineage():
            if name in one.names:
                return one.names[name]
        return None

    def method(self, name: str) -> Value | None:
        """Return a member that is a function."""
        member = self.find(name)
        return member if member is not None and member.kind == "func" else None


class Trail:
    """The changes of tables of names and attributes, which can be undone."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def set(self, table: dict[str, Any], key: str, value: Any) -> None:
        """Change an entry of a table."""
        self._changes.append((table, key, table.get(key, UNKNOWN)))
        table[key] = value

    def undo(self, mark: int) -> list[Change]:
        """Undo all changes since a mark; return the last value of each."""
        last: dict[tuple[int, str], Change] = {}
        while len(self._changes) > mark:
            table, key, old = self._changes.pop()
            last.setdefault((id(table), key), (table, key, table.get(key, UNKNOWN)))
            if old is UNKNOWN:
                table.pop(key, None)
            else:
                table[key] = old
        return list(last.values())

    def merge(self, sides: Sequence[list[Change]], by: int, *, stays: bool) -> None:
        """Join the changes of several arms with what was before, if a path without changes remains."""
        for table, key, values in _list_values(sides):
            self.set(table, key, join_all(key, values + [table.get(key, UNKNOWN)] * stays, by))

    def take_ranks(self, sides: list[tuple[tuple[int, ...], list[Change]]], list_active: Any) -> None:
        """Take the changes of groups of ranks."""
        for table, key, values in _list_values([changes for _, changes in sides]):
            by_rank = {rank: one for (group, _), one in zip(sides, values, strict=True) for rank in group}
            known = {rank: value for rank, value in by_rank.items() if value is not UNKNOWN}
            if all(isinstance(value, Value) for value in known.values()):
                self.set(table, key, of_ranks(known, list_active))
            else:
                self.set(table, key, join_all(key, values, Taint.NONE))

    def forget(self, sides: list[list[Change]]) -> None:
        """Keep of a loop's changes what holds in all rounds."""
        for side in sides:
            for table, key, value in side:
                base = table.get(key, UNKNOWN)
                if base is UNKNOWN or base is value:
                    continue
                if isinstance(value, Value) and isinstance(base, Value):
                    if key.startswith("#") and not value.kind:
                        continue
                    joined = join(base, value)
                    if not joined.kind and joined.is_known and base.is_known:
                        joined = unknown(joined.taint)
                    self.set(table, key, joined)
                elif key == "#items":
                    self.set(table, key, None)
                elif key == "#taint":
                    self.set(table, key, value)


def _list_values(sides: Sequence[list[Change]]) -> Iterator[tuple[dict[str, Any], str, list[Any]]]:
    """Yield the tables and keys of changes, and what each side leaves there."""
    tables = {(id(table), key): (table, key) for side in sides for table, key, _ in side}
    found = [{(id(table), key): value for table, key, value in side} for side in sides]
    for place, (table, key) in tables.items():
        base = table.get(key, UNKNOWN)
        yield table, key, [side.get(place, base) for side in found]


def join_all(key: str, values: list[Any], by: int) -> Any:
    """Join what several arms left in an entry."""
    first = values[0]
    for other in values[1:]:
        if isinstance(first, Value) and isinstance(other, Value):
            first = join(first, other, by)
        elif first is other:
            continue
        elif isinstance(first, Value) or isinstance(other, Value):
            first = first if isinstance(first, Value) else other
        elif key == "#taint":
            first = first if other is UNKNOWN else other if first is UNKNOWN else first | other | by
        elif key in ("#entries", "#items"):
            first = None
        else:
            first = first if other is UNKNOWN else other
    return first


def as_load(target: ast.AST) -> Any:
    """Return a target as an expression."""
    copy: Any = type(target)(**dict(ast.iter_fields(target)))
    copy.ctx = ast.Load()
    return ast.copy_location(copy, target)


@lru_cache(maxsize=1000)
def is_worth_unrolling(node: ast.For | ast.AsyncFor) -> bool:
    """Whether a short loop builds groups or lists, whose members are worth knowing."""
    if len(node.body) > 6:
        return False
    names = {
        part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
        for statement in node.body
        for part in ast.walk(statement)
        if isinstance(part, ast.Call)
    }
    return bool(names & {"new_group", "append"}) and not names & {"backward", "step", "save"}
