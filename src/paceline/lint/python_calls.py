"""Python's own functions, and those that start processes."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from paceline.lint import methods
from paceline.lint.facts import Handler, KnownCall, deps_of, known, known_items, known_length, make
from paceline.lint.names import canonical
from paceline.lint.values import Taint, Value, constant, mix, sequence, unknown


@known("mp.spawn mp.Process")
def call_spawn(c: KnownCall) -> Value:
    target = c.pick(0, "fn") if c.name != "Process" else c.kwargs.get("target")
    given = (c.pick(1, "args") if c.name != "Process" else c.kwargs.get("args")) or sequence((), "tuple")
    if target is None or target.kind != "func":
        return unknown()
    place, spawned = c.run.place, c.run.is_spawned
    c.run.place, c.run.is_spawned = place.spawned(), True
    count = c.pick(2, "nprocs") if c.name != "Process" else None
    values = [call_as_world(c.run, value, count) for value in given.items or ()]
    if c.name != "Process":
        values = [methods.place_value(c.run, "rank"), *values]
    try:
        c.run.call_function(target, values, {}, c.node)
    finally:
        c.run.place, c.run.is_spawned = place, spawned
    return unknown()


def call_as_world(run: Any, value: Value, count: Value | None) -> Value:
    """Return an argument of spawned processes: their number is the size of the world of a witness."""
    same = count is not None and (
        value is count or (value.is_known and count.is_known and value.const == count.const)
    )
    return methods.place_value(run, "world") if same or value.fact("devices") else value


@known("builtins.*")
def call_builtin(c: KnownCall) -> Value:
    first = c.args[0] if c.args else unknown(Taint.NONE)
    if c.name == "range":
        return call_range(c.run, c.args)
    if c.name == "enumerate":
        return Value("enumerate", ref=first, taint=first.taint, deps=first.deps)
    if c.name == "zip":
        return Value("zip", ref=tuple(c.args), taint=mix(c.args))
    if c.name == "len":
        length = known_length(first)
        value = (
            Value(const=length, taint=first.taint)
            if length is not None
            else unknown(first.taint & ~Taint.LOCAL)
        )
        value.attrs["#length"] = True
        return value
    if c.name in ("int", "str", "float", "bool"):
        if first.is_known and len(c.args) == 1:
            try:
                value = Value(
                    const={"int": int, "str": str, "float": float, "bool": bool}[c.name](first.const),
                    taint=first.taint,
                )
                value.attrs.update(
                    {name: fact for name, fact in first.attrs.items() if name in ("#world", "#devices")}
                )
                return value
            except (ValueError, TypeError):
                return unknown(first.taint)
        return first if not first.kind else unknown(first.taint)
    if c.name == "isinstance":
        return call_isinstance(first, c.args[1] if len(c.args) > 1 else unknown())
    if c.name in ("hasattr", "getattr"):
        return call_getattr(c.run, first, c.args, c.node, c.name)
    if c.name == "super":
        names = list(c.run.frame.names.values())
        return Value("super", ref=c.args[1] if len(c.args) > 1 else names[0] if names else unknown())
    if c.name == "next":
        return (
            c.run.element(first.ref if first.kind == "iterator" else first, 0)
            if first.kind != "iterator"
            else call_next(c.run, first)
        )
    if c.name == "map" and len(c.args) > 1:
        element = c.run.element(c.args[1], 0)
        return Value(
            "list",
            taint=mix(c.args),
            deps=c.args[1].deps,
            attrs={"#element": unknown(element.taint, element.deps)},
        )
    if c.name in ("filter",) and len(c.args) > 1:
        return Value(
            "list", taint=mix(c.args), deps=c.args[1].deps, attrs={"#element": c.run.element(c.args[1], 0)}
        )
    if c.name in ("min", "max", "sum", "abs", "round", "any", "all"):
        if all(arg.is_known for arg in c.args) and c.name in ("min", "max", "abs") and c.args:
            try:
                return Value(
                    const=getattr(builtins, c.name)(*(arg.const for arg in c.args)), taint=mix(c.args)
                )
            except Exception:
                pass
        return Value(
            "tensor" if any(arg.kind == "tensor" for arg in c.args) else "",
            taint=mix(c.args),
            deps=deps_of(c.args),
        )
    if c.name == "dict":
        return Value(
            "dict",
            taint=mix(c.kwargs.values()),
            deps=first.deps,
            attrs={"#entries": dict(c.kwargs) if not c.args else None},
        )
    if c.name == "print":
        return constant(None)
    if c.name == "open":
        return Value("file", ref=first, taint=first.taint)
    if c.name in ("locals", "globals", "vars", "eval", "exec"):
        c.run.num_unread_calls += 1
    return unknown(mix(c.values), deps_of(c.args))


def call_range(run: Any, args: list[Value]) -> Value:
    value = Value("range", taint=mix(args), ref=tuple(args))
    if (
        len(args) == 3
        and Taint.RANK in args[0].taint
        and args[2].is_known
        and args[2].const == run.place.world
    ):
        value.attrs["#split"] = True
        stop = args[1].const
        if not (isinstance(stop, int) and stop % run.place.world == 0) and not args[1].fact("even"):
            value.attrs["#uneven"] = True
    return value


def call_next(run: Any, first: Value) -> Value:
    source = first.ref
    return methods.batch_of(run, source) if source.kind == "loader" else run.element(source, 0)


def call_isinstance(one: Value, cls: Value) -> Value:
    if one.kind == "union":
        found = [call_isinstance(part, cls) for part in one.ref]
        if all(part.is_known and part.const == found[0].const for part in found):
            return found[0]
        return unknown(Taint.NONE)
    names = {canonical(part.ref).rpartition(".")[2] for part in (cls.items or (cls,)) if part.kind == "lib"}
    kinds = {
        "DistributedDataParallel": "ddp",
        "FullyShardedDataParallel": "fsdp",
        "DataParallel": "dp",
        "DistributedSampler": "sampler",
    }
    if one.kind in ("ddp", "fsdp", "dp", "model") and names and names <= set(kinds):
        return constant(one.kind in {kinds[name] for name in names})
    return unknown(Taint.NONE)


def call_getattr(run: Any, owner: Value, args: list[Value], node: ast.AST, last: str) -> Value:
    from paceline.lint import library  # which is built on this file

    name = args[1].const if len(args) > 1 and args[1].is_known else None
    if owner.kind in ("ddp", "fsdp") and isinstance(name, str):
        if name in owner.attrs:
            return constant(True) if last == "hasattr" else owner.attrs[name]
        inner = owner.attrs["module"]
        if last == "hasattr" and inner.kind == "model" and inner.script_class is not None:
            return constant(False) if inner.ref.find(name) is not None else unknown(Taint.NONE)
        return unknown(Taint.UNKNOWN, {owner})
    if owner.kind == "model" and name == "module":
        return constant(False) if last == "hasattr" else args[2] if len(args) > 2 else unknown()
    if owner.kind == "sampler" and name == "set_epoch" and last == "hasattr":
        return constant(True) if owner.fact("distributed") else unknown(Taint.NONE)
    if isinstance(name, str) and last == "getattr" and len(args) == 2:
        return library.get_attribute(run, owner, name, node)
    return unknown(owner.taint, owner.deps)


@known("copy.deepcopy itertools.cycle itertools.chain collections.deque builtins.list")
@known("builtins.tuple builtins.sorted builtins.reversed builtins.iter builtins.set")
def call_passes(c: KnownCall) -> Value:
    first = c.args[0] if c.args else c.kwargs.get("iterable", sequence(()))
    if c.name in ("deepcopy", "copy"):
        return call_copied(c.run, first, c.node)
    if first.kind == "loader" and c.name in ("iter", "cycle", "chain"):
        c.run.emit("iterate", c.node, loader=first)
        return Value("iterator", ref=first, taint=first.taint)
    if c.name in ("list", "tuple", "sorted") and first.kind in ("range", ""):
        items = known_items(first)
        return (
            sequence(items, "tuple" if c.name == "tuple" else "list")
            if items is not None
            else Value("list", taint=first.taint, deps=first.deps)
        )
    if c.name in ("list", "deque", "set") and not c.args:
        return sequence(())
    return first


def call_copied(run: Any, first: Value, node: ast.AST) -> Value:
    if first.kind == "model":
        value = make(run, "model", node, buffers=first.fact("buffers"))
        value.ref = first.ref
        value.attrs.update({name: part for name, part in first.attrs.items() if not name.startswith("#")})
        return value
    return methods.copied(first)


@known("*.tqdm")
def call_progress(c: KnownCall) -> Value:
    first = c.args[0] if c.args else c.kwargs.get("iterable")
    if first is None:
        return Value("progress", ref=sequence(()))
    return Value("progress", ref=first, taint=first.taint, deps=first.deps)


@known("os.path.join pathlib.Path")
def call_path(c: KnownCall) -> Value:
    value = unknown(mix(c.args))
    value.attrs["#pieces"] = tuple(arg.const if arg.is_known else arg for arg in c.args)
    if all(arg.is_known for arg in c.args) and c.args:
        return Value(const="/".join(str(arg.const) for arg in c.args), taint=value.taint)
    return value


_SIMPLE: dict[str, Handler] = {
    "functools.partial": lambda c: Value("partial", ref=(c.args[0], c.args[1:], dict(c.kwargs))),
    "argparse.ArgumentParser": lambda c: Value(attrs={"#defaults": {}}),
    "os.getenv": lambda c: methods.read_environment(
        c.run, c.run.environ, c.args[0], c.args[1] if len(c.args) > 1 else constant(None)
    ),
    "io.BytesIO": lambda c: Value("buffer"),
    "sys.exit os._exit builtins.exit builtins.quit": lambda c: Value("never"),
    "*.trange": lambda c: Value("progress", ref=Value("range", ref=tuple(c.args), taint=mix(c.args))),
}
for _names, _handler in _SIMPLE.items():
    known(_names)(_handler)
