"""Modules, functions, classes and calls in progress of a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from paceline.lint.values import UNKNOWN, Taint, Value, canonical, join

# Tables and keys that have changed, each with its last value.
Changes: TypeAlias = dict[tuple[int, str], tuple[dict[str, Any], str, Any]]


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
        self.pending: list[Changes] = []  # of paths that have left a loop or it
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
