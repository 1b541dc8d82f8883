"""Attributes, elements and calls of the objects that a script works with."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.lint import known_calls, library_calls, methods
from paceline.lint.facts import KnownCall, deps_of, escape, inherit, join_items, known_items, make, take_slice
from paceline.lint.values import Taint, Value, canonical, constant, join, mix, sequence, unknown, words

HANDLERS = known_calls  # which registers what it knows

# Other values don't mean other sizes.
SIZES = words("shape size ndim dim numel dtype device requires_grad is_cuda stride element_size")
_OF_SCRIPT = ("class", "instance", "model", "dataset", "optimizer")
# What a decorator says of a function.
_DECORATORS = {name: name for name in ("no_grad", "property", "static", "classmethod", "context")}
_DECORATORS |= {"inference_mode": "no_grad", "cached_property": "property", "staticmethod": "static"}
_DECORATORS |= {"contextmanager": "context", "asynccontextmanager": "context"}
_DECORATORS |= {"cache": "cached", "lru_cache": "cached"}


def each(c: KnownCall, value: Value, do: Callable[[Value], Value]) -> Value:
    """Do something with each alternative, as arms of an unknown branch; return any of the results."""
    found = c.run.fork_values(c.node, unknown(), [partial(do, one) for one in value.ref if not one.is_none])
    return join_items(found) if found else unknown()


def _each_but_none(value: Value, do: Callable[[Value], Value]) -> Value:
    return join_items([do(one) for one in value.ref if not one.is_none])


def get_attribute(run: Any, owner: Value, name: str, node: ast.AST) -> Value:
    """Return an attribute."""
    if owner.kind == "lib":
        dotted = f"{owner.ref}.{name}"
        return run.environ if dotted == "os.environ" else Value("lib", ref=dotted)
    if owner.kind == "module":
        found: Value | None = owner.ref.names.get(name)
        return found if found is not None else unknown()
    if owner.kind == "union":
        return _each_but_none(owner, lambda one: get_attribute(run, one, name, node))
    if name in owner.attrs:
        value: Value = owner.attrs[name]
        return value
    member = _member(owner, name)
    if member is not None and member.kind == "func" and owner.kind != "class":
        if member.fact("property"):
            return run.call_function(member, [], {}, node, owner=owner)  # type: ignore[no-any-return]
        if not member.fact("static"):
            return Value("func", ref=member.ref, node=member.node, attrs={**member.attrs, "#self": owner})
    if member is not None:
        return member
    # Whatever it is: the same object each time.
    taint = owner.taint
    if owner.fact("escaped") or owner.kind in ("instance", "class", "func"):
        taint |= Taint.UNKNOWN
    if name in SIZES:
        taint = (taint & ~Taint.LOCAL) | Taint.UNKNOWN
    value = unknown(taint, owner.deps)
    if owner.kind in ("model", "ddp", "fsdp"):
        value.deps = owner.deps | {owner}
        value.attrs["#part"] = True
    defaults = owner.fact("defaults")
    if defaults is not None and name in defaults:
        value.attrs["#default"] = defaults[name]
    if name in ("grad", "data"):
        value.kind = "tensor"
        value.attrs["#grad"] = name == "grad" or owner.fact("grad")
    owner.attrs[name] = value
    return value


def set_attribute(run: Any, owner: Value, name: str, value: Value, node: ast.AST) -> None:
    """Set an attribute."""
    for one in owner.alternatives():
        if one.kind == "module" or (one.kind == "lib" and one.ref == "builtins"):
            run.set(one.ref.names if one.kind == "module" else run.builtins, name, value)
            continue
        if name == "grad":
            run.emit("clear", node, target=one)
        if name == "requires_grad":
            run.emit("requires_grad", node, target=one, value=value)
        if name in ("require_backward_grad_sync", "require_forward_param_sync"):
            run.set(one.attrs, "#own_sync", True)
        run.set(one.attrs, name, value)


def set_item(run: Any, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
    """Set an element."""
    for one in owner.alternatives():
        if one.kind == "environ":
            if key.is_known:
                run.emit(
                    "setenv", node, key=key.const, value=value, guard=run.num_forks > 0, late=run.has_torch
                )
                run.set(one.attrs, str(key.const), value)
            continue
        entries = one.fact("entries")
        if entries is not None and key.is_known:
            run.set(one.attrs, "#entries", {**entries, str(key.const): value})
        elif one.kind in ("list", "dict"):
            run.set(one.attrs, "#items", None)
            element = one.fact("element")
            run.set(one.attrs, "#element", value if element is None else join(element, value))
            if one.kind == "dict":
                run.set(one.attrs, "#entries", None)
        taint = one.taint | value.taint | (key.taint & ~Taint.UNKNOWN)
        for by in run.conditions:
            taint |= by
        if taint != one.taint:
            run.set(one.attrs, "#taint", taint)


def get_item(run: Any, owner: Value, key: Value, node: ast.AST) -> Value:
    """Return an element."""
    if owner.kind == "union":
        return _each_but_none(owner, lambda one: get_item(run, one, key, node))
    if owner.kind == "environ":
        return methods.read_environment(run, owner, key, None)
    if key.kind == "slice":
        return take_slice(run, owner, key)
    if key.is_known:
        entries = owner.fact("entries")
        if entries is not None and str(key.const) in entries:
            value: Value = entries[str(key.const)]
            return value
        items = known_items(owner)
        if items is not None and isinstance(key.const, int) and -len(items) <= key.const < len(items):
            return items[key.const]
    if owner.kind in ("model", "ddp", "fsdp"):
        return Value(taint=owner.taint, deps=owner.deps | {owner}, attrs={"#part": True})
    if owner.kind in ("mesh", "loaded", "state", "lib"):
        part = methods.copied(owner)
        part.attrs["#axis"] = key.const
        return part
    items = owner.items or tuple((owner.fact("entries") or {}).values())
    if items and Taint.RANK & key.taint:
        found = join_items(items)
        return Value(found.kind, taint=found.taint | key.taint, deps=found.deps) if not found.kind else found
    element = owner.fact("element")
    if element is not None and isinstance(element, Value):
        return element
    if items:
        return join_items(items)
    kind = "tensor" if owner.kind == "tensor" else ""
    return Value(kind, taint=owner.taint | (key.taint & ~Taint.UNKNOWN), deps=owner.deps)


def _member(value: Value, name: str) -> Value | None:
    """Return a member of a class of the script's, or of an object of one."""
    cls = value.script_class if value.kind in _OF_SCRIPT else None
    return cls.find(name) if cls is not None else None


def _method(value: Value, name: str) -> Value | None:
    member = _member(value, name) if value.kind != "class" else None
    return member if member is not None and member.kind == "func" else None


def iterate(run: Any, source: Value, node: ast.AST) -> Value:
    """Return what a loop over a value gives in a round."""
    if source.kind == "union":
        return _each_but_none(source, lambda one: iterate(run, one, node))
    if source.kind == "enumerate":
        number = Value(attrs={"#number": True})
        return sequence((number, iterate(run, source.ref, node)), "tuple")
    if source.kind == "zip":
        return sequence([iterate(run, one, node) for one in source.ref], "tuple")
    if source.kind == "iterator":
        return iterate(run, source.ref, node)
    if source.kind == "loader":
        run.emit("iterate", node, loader=source)
        return methods.batch_of(run, source)
    if source.kind == "range":
        return unknown(source.taint)
    if source.kind == "model" and (parts := [one for name, one in source.attrs.items() if name.isdigit()]):
        return join_items(parts)
    if source.fact("own_step"):  # gradients are summed once all of its microbatches are through
        run.emit("coll", node, op="the loop over a step", via="framework")
    if (member := _method(source, "__iter__")) is not None:
        return run.element(run.call_function(member, [], {}, node, owner=source), 0)  # type: ignore[no-any-return]
    items = known_items(source)
    if items is not None:
        if all(item.is_known and not item.kind for item in items) and len(items) != 1:
            return unknown(mix(items) | source.taint)
        return join_items(items)
    return run.element(source, 0)  # type: ignore[no-any-return]


def decorate(run: Any, decorator: ast.expr, value: Value) -> Value:
    """Return what a decorator makes of a function."""
    found = run.eval(decorator)
    name = canonical(found.ref) if found.kind == "lib" else ""
    last = name.rpartition(".")[2]
    if found.kind == "func":
        return run.call_function(found, [value], {}, decorator)  # type: ignore[no-any-return]
    fact = "no_grad" if found.kind == "no_grad" else _DECORATORS.get(last)
    if "rank_zero" in last or "on_main_process" in last or "main_process_only" in last:
        fact = "rank_zero"
    if fact is not None:
        value.attrs[f"#{fact}"] = True
    return value


def enter(run: Any, value: Value, node: ast.AST) -> Callable[[], None]:
    """Enter a context, which may be the script's own; return what leaves it."""
    first, last = _method(value, "__enter__"), _method(value, "__exit__")
    if first is not None:
        value.attrs["#as"] = run.call_function(first, [], {}, node, owner=value)
    if last is not None:
        return lambda: run.call_function(last, [constant(None)] * 3, {}, node, owner=value) and None
    return methods.enter(run, value)


def instantiate(c: KnownCall, cls: Value) -> Value:
    """Return a new object of a class of the script."""
    bases = set(cls.ref.library_bases())
    lasts = {base.rpartition(".")[2] for base in bases}
    kind = "instance"
    if any(base.startswith("nn.") for base in bases):
        kind = "model"
    elif lasts & {"Dataset", "IterableDataset", "IterDataPipe", "MapDataPipe"}:
        kind = "dataset"
    elif any(base.startswith("optim.") for base in bases):
        kind = "optimizer"
    value = make(c.run, kind, c.node, c.values)
    value.ref = cls.ref
    if kind == "model":
        value.deps = frozenset()
    if kind == "dataset":
        value.attrs["#iterable"] = bool(lasts & {"IterableDataset", "IterDataPipe"})
    if "?" in bases:
        value.attrs["#escaped"] = True
    if (init := cls.ref.method("__init__")) is not None:
        c.run.call_function(init, c.args, c.kwargs, c.node, owner=value)
    else:
        value.attrs.update(c.kwargs)
        escape(c.run, c.values)
    return value


def call(c: KnownCall, callee: Value) -> Value:
    """Return the result of a call."""
    if callee.kind == "union":
        return each(c, callee, lambda one: call(c, one))
    if callee.kind == "func":
        return _call_script(c, callee)
    if callee.kind == "class":
        return instantiate(c, callee)
    if callee.kind == "lib":
        return library_calls.call_library(c, callee.ref)
    if callee.kind in ("model", "ddp", "fsdp", "dp"):
        return methods.forward(replace(c, owner=callee))
    if (member := _method(callee, "__call__")) is not None:
        return c.run.call_function(member, c.args, c.kwargs, c.node, owner=callee)  # type: ignore[no-any-return]
    if callee.kind == "partial":
        function, first, named = callee.ref
        return call(replace(c, args=[*first, *c.args], kwargs={**named, **c.kwargs}), function)
    escape(c.run, c.values)
    if callee.is_opaque and Taint.UNKNOWN & callee.taint and not callee.deps:
        c.run.num_unread_calls += 1
    # Code that was not read may have made it the same on all ranks.
    values = [callee, *c.values]
    return unknown((mix(values) & ~Taint.LOCAL) | Taint.UNKNOWN, deps_of(values))


def _call_script(c: KnownCall, callee: Value) -> Value:
    if callee.fact("rank_zero") and c.run.place.rank != 0:
        return constant(None)
    if callee.fact("cached") and id(callee.ref.node) in c.run.visited:
        return unknown()  # it may be what an earlier call has returned
    c.run.no_grad += bool(callee.fact("no_grad"))
    result: Value = c.run.call_function(callee, c.args, c.kwargs, c.node)
    c.run.no_grad -= bool(callee.fact("no_grad"))
    if callee.fact("context"):
        return Value("context", taint=result.taint, attrs={"#as": c.run.element(result, 0)})
    return result


def call_method(c: KnownCall) -> Value:
    """Return the result of a call of a method."""
    owner, name = c.owner, c.name
    if owner.kind == "union":
        return each(c, owner, lambda one: call_method(replace(c, owner=one)))
    if owner.kind == "super":
        return _call_super(c)
    if owner.kind in ("lib", "module", "class") or name in owner.attrs or _member(owner, name) is not None:
        member = get_attribute(c.run, owner, name, c.node)
        if owner.kind == "class" and member.fact("classmethod"):
            c = replace(c, args=[owner, *c.args])
        return call(c, member)
    result = methods.call(c)
    if result is not None:
        return result
    escape(c.run, c.values)
    if name.endswith("_") and not name.startswith("_") and owner.kind in ("", "tensor"):
        if owner.fact("grad"):
            c.run.emit("grad", c.node)
        return owner
    kind = owner.kind if owner.kind == "tensor" else ""
    taint = mix([owner, *c.values])
    is_local = not owner.kind and owner.taint & Taint.LOCAL
    is_own = is_local or owner.kind in ("tensor", "list", "dict", "tuple")
    if not is_own:
        taint = (taint & ~Taint.LOCAL) | Taint.UNKNOWN  # it may have made it the same on all ranks
    value = Value(kind, taint=taint, deps=owner.deps | deps_of(c.values), node=c.node)
    inherit(value, [owner])
    if owner.fact("part"):
        value.attrs["#part"] = True
    if name in SIZES:
        return unknown((owner.taint & ~Taint.LOCAL) | Taint.UNKNOWN)
    if name == "mean" and not any(Taint.UNKNOWN & one.taint and not one.kind for one in c.args):
        value.attrs["#mean"] = True
    return value


def _call_super(c: KnownCall) -> Value:
    me: Value = c.owner.ref
    if me.kind not in _OF_SCRIPT or me.script_class is None:
        return unknown()
    active = c.run.active[-1] if c.run.active else 0
    inside = (one for one in me.ref.lineage() if id(getattr(one.names.get(c.name), "node", None)) == active)
    current = next(inside, me.ref)
    for base in current.bases:
        if base.kind == "class" and (member := base.ref.method(c.name)) is not None:
            return c.run.call_function(member, c.args, c.kwargs, c.node, owner=me)  # type: ignore[no-any-return]
    if c.name == "__init__":
        return constant(None)
    return methods.call(replace(c, owner=me)) or unknown()
