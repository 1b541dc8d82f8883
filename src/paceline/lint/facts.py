"""Facts about objects of a script: lengths, members, who has them, how ranks split them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.lint.values import Taint, Value, join, mix, sequence, unknown, words

if TYPE_CHECKING:
    from paceline.lint.evaluation import Evaluator

_INHERITED = ("uneven", "split", "even")
_OBJECTS = words("loader sampler optimizer scheduler scaler model ddp fsdp dataset instance")
_Result = TypeVar("_Result", bound="Value | None")
_MOST_JOINED = 8
_MOST_ITEMS = 64


def make(run: Evaluator, kind: str, node: ast.AST, values: Iterable[Value] = (), **facts: Any) -> Value:
    """Return a new object of a library."""
    values = list(values)
    deps = deps_of(values)
    deps |= {value for value in values if value.kind in ("model", "ddp", "fsdp", "loader")}
    attrs = {f"#{name}": fact for name, fact in facts.items()}
    value = Value(kind, taint=mix(values), deps=deps, node=node, attrs=attrs)
    value.loops = run.loops
    inherit(value, values)
    return value


def inherit(value: Value, sources: Iterable[Value]) -> None:
    """Pass on how ranks split the data that a value is made of."""
    for source in sources:
        for one in source.alternatives():
            for name in _INHERITED:
                if one.fact(name):
                    value.attrs["#" + name] = one.fact(name)
            if one.kind in ("dataset", "instance"):
                parts = [part for part in one.attrs.values() if isinstance(part, Value)]
                if any(part.fact("uneven") for part in parts if part.kind in ("list", "range", "dataset")):
                    value.attrs["#uneven"] = True


def escape(run: Evaluator, values: Iterable[Value], depth: int = 0) -> None:
    """Record that code which was not read has got values, and may do anything with them."""
    for value in values:
        for one in value.alternatives():
            if one.kind in ("*", "enumerate", "iterator"):
                escape(run, [one.ref], depth)
            if one.kind in _OBJECTS or one.kind in ("list", "tuple", "dict", "", "tensor", "state"):
                if one.kind in _OBJECTS or one.is_opaque:
                    run.set(one.attrs, "#escaped", True)
                if depth < 2:
                    inner = [part for part in one.attrs.values() if isinstance(part, Value)]
                    inner += [*(one.items or ()), *(one.fact("entries") or {}).values()]
                    escape(run, inner, depth + 1)
            if one.kind in ("", "tensor") and one.deps:
                escape(run, [dep for dep in one.deps if dep.kind == "loader"], depth + 1)


def known_items(value: Value) -> tuple[Value, ...] | None:
    """Return the elements that a loop gets, where few enough are known."""
    if value.kind != "range":
        return value.items
    numbers = _range_of(value)
    if numbers is None or len(numbers) > _MOST_ITEMS:
        return None
    return tuple(Value(const=number, taint=value.taint) for number in numbers)


def _range_of(value: Value) -> range | None:
    with suppress(ValueError, TypeError):  # of bounds that are not known, or no numbers
        return range(*(part.const for part in value.ref))
    return None


def known_length(value: Value) -> int | None:
    """Return how many elements it has."""
    if value.kind in ("enumerate", "iterator"):
        return known_length(value.ref)
    items = _range_of(value) if value.kind == "range" else value.items
    return len(items) if items is not None else None


def is_same(a: Value, b: Value) -> bool | None:
    """Return whether two values are the same object, or None if that is not known."""
    if "union" in (a.kind, b.kind):
        return None
    if a.is_known and b.is_known:
        return a.const is b.const or (a.const == b.const and isinstance(a.const, (bool, int, str)))
    other = b if a.is_none else a
    is_object = other.kind and (other.kind != "tensor" or other.node)
    return False if (a.is_none or b.is_none) and is_object else None


def contains(box: Value, one: Value) -> bool | None:
    """Return whether a container has an element, or None if that is not known."""
    if not one.is_known or isinstance(box.const, str):
        return None
    if box.kind == "environ":  # of a launcher
        return True if one.const in ("RANK", "WORLD_SIZE", "LOCAL_RANK") else None
    items = known_items(box)
    if items is not None and all(item.is_known for item in items):
        return any(item.const == one.const for item in items)
    return None


def keep_facts(result: Value, left: Value, op: ast.operator, right: Value) -> None:
    """Pass on what an operator leaves true."""
    if isinstance(op, ast.Mod) and not result.is_known:
        size = right.const if right.is_known else right.fact("default")
        result.attrs |= {"#window": size if isinstance(size, int) else "?", "#left_over": right.fact("world")}
    if isinstance(op, ast.FloorDiv) and right.fact("world"):
        result.attrs["#per_rank"] = True
    is_multiple = any(a.fact("per_rank") and b.fact("world") for a, b in ((left, right), (right, left)))
    if (isinstance(op, ast.Mult) and is_multiple) or (isinstance(op, ast.Sub) and right.fact("left_over")):
        result.attrs["#even"] = True


def take_slice(run: Evaluator, value: Value, part: Value) -> Value:
    """Return a slice of a sequence, with how ranks split it."""
    lower, upper, step = part.ref
    items = known_items(value)
    bounds: list[Any] = [one.const if one.is_known else ... for one in (lower, upper, step)]
    kind = "range" if value.kind == "range" else value.kind if value.kind in ("tuple", "tensor") else "list"
    is_stride = step.fact("world") or (step.is_known and step.const == run.place.world)
    by_step = Taint.RANK & lower.taint and is_stride
    by_block = Taint.RANK & lower.taint and Taint.RANK & upper.taint
    if items is not None and ... not in bounds:
        result = sequence(items[slice(*bounds)], "tuple" if kind == "tuple" else "list")
        result.start_taint |= part.taint
        uneven = by_step and len(items) % run.place.world != 0
    else:
        result = Value(kind if kind != "range" else "list", taint=value.taint | part.taint, deps=value.deps)
        uneven = by_step and not value.fact("even") and value.kind != "tensor"
    inherit(result, [value])
    if by_step or by_block:
        result.attrs["#split"] = True
    if uneven:
        result.attrs["#uneven"] = True
    if upper.fact("even"):
        result.attrs["#even"] = True
    return result


def buffers_of(model: Value) -> bool | None:
    """Return whether a module has buffers, or None if that is not known."""
    if model.kind in ("ddp", "fsdp", "dp"):
        return buffers_of(model.attrs["module"])
    if model.kind != "model":
        return None
    known: bool | None = model.fact("buffers")
    if known or model.script_class is None:
        return known
    for one in model.ref.lineage():
        if any(isinstance(n, ast.Attribute) and n.attr == "register_buffer" for n in ast.walk(one.node)):
            return True
    if any(name not in ("torch.nn.Module", "nn.Module") for name in model.ref.library_bases()):
        return None
    parts = [part for part in model.attrs.values() if isinstance(part, Value)]
    found = [buffers_of(part) for part in parts if part.kind == "model"]
    if True in found:
        return True
    return None if None in found or any(part.is_opaque for part in parts) else False


def join_items(items: Iterable[Value]) -> Value:
    """Return any one of some values."""
    items = list(items)
    if not items:
        return unknown(Taint.NONE)
    if len(items) > _MOST_JOINED:
        return unknown(mix(items), deps_of(items))
    return reduce(join, items)


@dataclass
class KnownCall:
    """A call of something that the linter knows: a function of a library, or a method of `owner`."""

    run: Any
    args: list[Value]
    kwargs: dict[str, Value]
    node: ast.AST
    name: str
    owner: Value = field(default_factory=unknown)

    def pick(self, index: int, name: str) -> Value | None:
        """Return an argument by position or name."""
        if any(arg.kind == "*" for arg in self.args[: index + 1]):
            return unknown()
        if 0 <= index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name) if name in self.kwargs or "**" not in self.kwargs else unknown()

    def is_set(self, name: str) -> bool:
        """Return whether a keyword argument is given, and known to be true."""
        value = self.kwargs.get(name)
        return value is not None and value.is_known and bool(value.const)

    def tell(self, kind: str, result: _Result, **data: Any) -> _Result:
        """Record an event, and return the result."""
        self.run.emit(kind, self.node, **data)
        return result

    def note(self, fact: str, value: Any, result: _Result) -> _Result:
        """Set a fact of the owner, and return the result."""
        self.run.set(self.owner.attrs, f"#{fact}", value)
        return result

    @property
    def values(self) -> list[Value]:
        """All arguments."""
        return [*self.args, *self.kwargs.values()]


Handler = Callable[[KnownCall], Value | None]
# Functions by short name, by its head with ".*", or by its last part with "*."; methods by (kind, name).
KNOWN: dict[Any, Handler] = {}


def known(names: str, of: str = "") -> Callable[[Handler], Handler]:
    """Register what functions of libraries do, or the methods of objects of some kinds."""

    def register(handler: Handler) -> Handler:
        keys: list[Any] = [(kind, name) for kind in of.split() for name in names.split()]
        KNOWN.update(dict.fromkeys(keys or names.split(), handler))
        return handler

    return register


def deps_of(values: Iterable[Value]) -> frozenset[Value]:
    """Return the models, loaders and parameters that went into values."""
    return frozenset[Value]().union(*(value.deps for value in values))
