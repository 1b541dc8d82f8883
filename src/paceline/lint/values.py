"""Abstract values: what is known about an object of the script, and from where it comes."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any


class Taint:
    """The origins of a value as bits; without any it is the same on every rank, as arguments are."""

    NONE = 0
    RANK = 1  # follows from the number of the rank
    LOCAL = 2  # differs between ranks: a clock, a draw without a common seed, this rank's share of the data
    UNKNOWN = 4  # out of code that was not read


UNKNOWN: Any = object()
_MOST_ALTERNATIVES = 4
# Kinds of values without an identity: two of them join to an unknown one.
_PLAIN = {"", "tensor"}
# Short names for what torch has under several long ones; the first that a name starts with is the one.
_SHORT = """
    distributed.elastic elastic, distributed.rpc rpc, distributed.nn dnn, distributed.distributed_c10d dist,
    distributed.fsdp fsdp, distributed._composable fsdp, distributed.checkpoint dcp,
    distributed._functional_collectives dnn, distributed.algorithms.join join, distributed.tensor dtensor,
    distributed.device_mesh mesh, distributed dist, utils.data data, nn.parallel parallel, nn.utils nnutils,
    nn.functional F, nn nn, optim.lr_scheduler sched, optim optim, cuda.amp amp, amp amp, multiprocessing mp
"""
_PREFIXES = [(f"torch.{long}.", f"{short}.") for long, short in (pair.split() for pair in _SHORT.split(","))]
_PREFIXES.append(("multiprocessing.", "mp."))


class Value:
    """An object of the script under one witness.

    Attributes:
        const: the Python object where it is known, else UNKNOWN.
        kind: what it is: "" (a number, string or unknown), "lib", "func", "class", "model", "ddp", ...
        ref: what belongs to the kind: the dotted name, the function, the class.
        attrs: attributes; names with # are facts of the linter. All that can be undone stands here.
        deps: models, loaders and parameters that went into it.
        node: where it was made.
        loops: the loops around that place.
    """

    __slots__ = ("attrs", "const", "deps", "kind", "loops", "node", "ref", "start_taint")

    def __init__(
        self,
        kind: str = "",
        const: Any = UNKNOWN,
        taint: int = Taint.NONE,
        ref: Any = None,
        deps: frozenset[Value] = frozenset(),
        node: ast.AST | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.const = const
        self.start_taint = taint
        self.ref = ref
        self.deps = deps
        self.node = node
        self.attrs: dict[str, Any] = attrs if attrs is not None else {}
        self.loops: tuple[int, ...] = ()

    @property
    def taint(self) -> int:
        """The origins, as they are now: a collective changes those of a tensor."""
        taint: int = self.attrs.get("#taint", self.start_taint)
        return taint

    @property
    def is_known(self) -> bool:
        """Whether the Python object is known."""
        return self.const is not UNKNOWN

    @property
    def is_none(self) -> bool:
        """Whether it is None."""
        return self.const is None

    @property
    def script_class(self) -> Any:
        """The class of the script of which it is an object, or None."""
        return None if isinstance(self.ref, str) else self.ref

    @property
    def is_opaque(self) -> bool:
        """Whether nothing is known about it."""
        return not self.kind and not self.is_known

    @property
    def items(self) -> tuple[Value, ...] | None:
        """The elements of a list or tuple whose length is known."""
        items: tuple[Value, ...] | None = self.attrs.get("#items")
        return items

    def fact(self, name: str) -> Any:
        """Return a fact of the linter, or None."""
        return self.attrs.get("#" + name)

    def alternatives(self) -> tuple[Value, ...]:
        """Return what it may be."""
        return self.ref if self.kind == "union" else (self,)

    def of_kind(self, *kinds: str) -> list[Value]:
        """Return the alternatives of a kind."""
        return [one for one in self.alternatives() if one.kind in kinds]


def constant(const: Any, taint: int = Taint.NONE, **facts: Any) -> Value:
    """Return a known value."""
    attrs = {f"#{name}": fact for name, fact in facts.items()} if facts else None
    return Value("", const, taint, attrs=attrs)


def unknown(taint: int = Taint.UNKNOWN, deps: Iterable[Value] = (), node: ast.AST | None = None) -> Value:
    """Return a value of which only the origins are known."""
    return Value(taint=taint, deps=frozenset(deps), node=node)


def tainted(value: Value, by: int) -> Value:
    """Return a number or text whose choice followed from other values."""
    by &= Taint.RANK | Taint.LOCAL
    if value.kind or not by & ~value.taint:
        return value
    attrs = {name: fact for name, fact in value.attrs.items() if name != "#taint"}
    return Value("", value.const, value.taint | by, value.ref, value.deps, value.node, attrs)


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def sequence(items: Iterable[Value], kind: str = "list") -> Value:
    """Return a list or tuple of known length."""
    items = tuple(items)
    taint = mix(items)
    deps = frozenset[Value]().union(*(item.deps for item in items))
    return Value(kind, taint=taint, deps=deps, attrs={"#items": items})


def mix(values: Iterable[Value]) -> int:
    """Return the origins of what is computed from values."""
    taint = Taint.NONE
    for value in values:
        taint |= value.taint
    return taint


def _mix_alternatives(a: Value, b: Value, by: int) -> int:
    taint = a.taint | b.taint
    if Taint.LOCAL & taint and not (Taint.LOCAL & a.taint and Taint.LOCAL & b.taint):
        other = b if Taint.LOCAL & a.taint else a
        if not other.is_known:  # reduced in one branch: which of both it is, is not proved
            taint = (taint & ~Taint.LOCAL) | Taint.UNKNOWN
    return taint | by


def join(a: Value, b: Value, by: int = Taint.NONE) -> Value:
    """Return a value after a branch that made it one or the other; `by` are the condition's origins."""
    if a is b:
        return a
    if not a.kind and not b.kind and a.is_known and b.is_known and type(a.const) is type(b.const):
        try:
            if a.const == b.const:
                return Value(const=a.const, taint=a.taint | b.taint)
        except Exception:
            pass
    plain_a, plain_b = a.kind in _PLAIN, b.kind in _PLAIN
    if plain_a and plain_b:
        if a.is_none != b.is_none and "tensor" in (a.kind, b.kind):
            return _union(a, b)
        kind = a.kind if a.kind == b.kind else ""
        return Value(kind, taint=_mix_alternatives(a, b, by), deps=a.deps | b.deps, node=a.node or b.node)
    if a.kind == b.kind and a.kind in ("list", "tuple", "dict", "state"):
        same = a.items is not None and b.items is not None and len(a.items) == len(b.items)
        if same and a.items is not None and b.items is not None:
            return sequence((join(x, y, by) for x, y in zip(a.items, b.items, strict=True)), a.kind)
        return Value(a.kind, taint=_mix_alternatives(a, b, by), deps=a.deps | b.deps, node=a.node)
    return _union(a, b)


def _union(a: Value, b: Value) -> Value:
    found: list[Value] = []
    for one in (*a.alternatives(), *b.alternatives()):
        if not any(
            one is other or (one.kind == "lib" == other.kind and one.ref == other.ref) for other in found
        ):
            found.append(one)
    taint, deps = a.taint | b.taint, a.deps | b.deps
    if len(found) > _MOST_ALTERNATIVES or any(one.is_opaque for one in found):
        objects = [one for one in found if not one.is_opaque][:_MOST_ALTERNATIVES]
        return Value("union", taint=taint | Taint.UNKNOWN, ref=(*objects, unknown()), deps=deps)
    return Value("union", taint=taint, ref=tuple(found), deps=deps)


@dataclass(frozen=True)
class WitnessPlace:
    """The place at which a witness runs."""

    rank: int
    local_rank: int
    node: int
    world: int = 16
    local_world: int = 8
    num_nodes: int = 2

    @classmethod
    def of(cls, rank: int) -> WitnessPlace:
        """Return the place of a rank."""
        return cls(rank, rank % cls.local_world, rank // cls.local_world)

    def spawned(self) -> WitnessPlace:
        """Return the place of a child of `mp.spawn`: on one node, with a device for each."""
        return WitnessPlace(self.rank, self.rank, 0, self.world, self.world, 1)


WITNESSES = tuple(map(WitnessPlace.of, (0, 1, 8)))


@cache
def canonical(name: str) -> str:
    """Return the short name by which the tables below know something of torch."""
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if short == "nn." and rest == "DataParallel":
                return "parallel.DataParallel"
            return short + rest.rpartition(".")[2]
    return name
