"""Methods and attributes of the objects of torch and its neighbours, by what they do to a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.lint.facts import (
    KNOWN,
    Handler,
    KnownCall,
    buffers_of,
    deps_of,
    escape,
    inherit,
    known,
    known_items,
    make,
)
from paceline.lint.values import Taint, Value, constant, join, mix, sequence, unknown, words

_OF_TEXT = words("format join lower upper strip startswith endswith replace")
_CLEARS = {"zero_grad", "zero_grad_buffer"}
_MODULES = "model ddp fsdp dp"
_OWN_SYNC = "register_comm_hook register_buffer set_requires_gradient_sync set_requires_all_reduce"
_WORDS_OF = {
    "rank": "RANK SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK",
    "local_rank": "LOCAL_RANK SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK",
    "world": "WORLD_SIZE SLURM_NTASKS SLURM_NPROCS OMPI_COMM_WORLD_SIZE PMI_SIZE",
    "local_world": "LOCAL_WORLD_SIZE",
    "node": "GROUP_RANK NODE_RANK SLURM_NODEID",
    "num_nodes": "SLURM_NNODES",
}
RANK_WORDS = {word: field for field, text in _WORDS_OF.items() for word in text.split()}
_OF_ALL = {"world", "local_world", "num_nodes"}


def place_value(run: Any, field: str, *, text: bool = False) -> Value:
    """Return a number of the witness's place."""
    number = getattr(run.place, field)
    taint = Taint.NONE if field in _OF_ALL else Taint.RANK
    return constant(str(number) if text else number, taint, **{field: True})


def read_environment(run: Any, owner: Value, key: Value, default: Value | None) -> Value:
    """Return a variable of the environment."""
    name = str(key.const) if key.is_known else ""
    if name in owner.attrs:
        return owner.attrs[name]  # type: ignore[no-any-return]
    if name in RANK_WORDS:
        run.reads.add(name)
        return place_value(run, RANK_WORDS[name], text=True)
    if default is not None and not default.is_known:
        return unknown(default.taint)
    if not key.is_known:  # it may be a number of the place
        return unknown()
    return unknown(Taint.RANK if name in ("HOSTNAME", "HOST") else Taint.NONE)


def batch_of(run: Any, loader: Value) -> Value:
    """Return a batch of a loader."""
    sampler, dataset = loader.attrs["sampler"], loader.attrs["dataset"]
    taint = Taint.UNKNOWN
    if sampler.fact("distributed") or dataset.taint & (Taint.RANK | Taint.LOCAL) or dataset.fact("split"):
        taint = Taint.LOCAL
    value = unknown(taint, {loader} | loader.deps)
    inherit(value, [loader])
    return value


def forward(c: KnownCall) -> Value:
    """Return the output of a module, and record its forward."""
    model, taint = c.owner, mix(c.values)
    deps = deps_of(c.values) | model.deps | {model}
    if model.kind == "model" and isinstance(model.ref, str) and model.ref.endswith("Loss"):
        mean = {"#mean": model.fact("mean")}
        return Value("tensor", taint=taint, deps=deps - {model}, node=c.node, attrs=mean)
    shares = model.kind == "ddp" and model.fact("broadcast_buffers") is not False
    quiet = is_quiet(c.run, model)
    c.run.emit("forward", c.node, model=model, buffers=shares and buffers_of(model), is_quiet=quiet)
    c.run.set(model.attrs, "#forward_quiet", quiet)
    inner = model.ref.method("forward") if model.fact("sharded") and model.script_class is not None else None
    if inner is not None:  # its blocks gather their parameters
        c.run.call_function(inner, c.args, c.kwargs, c.node, owner=model)
    return Value("tensor", taint=taint, deps=deps if c.run.no_grad == 0 else frozenset(), node=c.node)


def is_quiet(run: Any, model: Value) -> bool | None:
    """Return whether a wrapped model is in its `no_sync`, or None if that is not known."""
    found: bool | None = False
    for context in run.no_sync:
        for one in context.of_kind("no_sync"):
            if one.ref is model:
                found = True if context.kind == "no_sync" else None
            elif one.ref is None:
                found = None
    if model.fact("own_sync"):
        return None
    return found


def backward(c: KnownCall) -> Value:
    """Record a backward."""
    loss = c.owner
    wrapped = [dep for dep in loss.deps if dep.kind in ("ddp", "fsdp") or dep.fact("sharded")]
    quiet = {model: is_quiet(c.run, model) for model in wrapped}
    return c.tell(
        "backward",
        constant(None),
        deps=loss.deps,
        quiet=quiet,
        scaler=loss.fact("scaled"),
        is_mean=bool(loss.fact("mean")),
        is_averaged=bool(loss.fact("averaged")),
        late=[model for model in wrapped if quiet[model] and model.fact("forward_quiet") is False],
    )


def call(c: KnownCall) -> Value | None:
    """Return the result of a method that means something, or None."""
    owner, name, args = c.owner, c.name, c.args
    if name == "backward" and owner.kind in ("tensor", ""):
        return backward(c)
    if name in _CLEARS:
        return c.tell("clear", constant(None), target=owner)
    if name == "full_tensor" and any(one.fact("sharded") and not one.fact("group") for one in owner.deps):
        c.tell("coll", None, op=name, via="state")
    if name == "load_state_dict" and not owner.kind:
        c.tell("load_state", None, model=owner, state=args[0] if args else None)
    method = KNOWN.get((owner.kind, name)) or KNOWN.get((owner.kind, "*"))
    if method is not None:
        return method(c)
    if owner.is_known and isinstance(owner.const, str):
        return _string(c)
    if name == "add_argument":
        _add_argument(owner, args, c.kwargs)
        return unknown(Taint.NONE)
    if name in ("parse_args", "parse_known_args"):
        values = Value(taint=Taint.NONE, attrs={"#defaults": owner.fact("defaults") or {}})
        if "local_rank" in values.fact("defaults"):
            values.attrs["local_rank"] = place_value(c.run, "local_rank")
        return values if name == "parse_args" else sequence((values, unknown(Taint.NONE)), "tuple")
    return None


def _add_argument(owner: Value, args: list[Value], kwargs: dict[str, Value]) -> None:
    names = [arg.const for arg in args if arg.is_known and isinstance(arg.const, str)]
    if names:
        name = next((one for one in names if one.startswith("--")), names[0])
        dest = kwargs["dest"].const if "dest" in kwargs else name.lstrip("-").replace("-", "_")
        default = kwargs.get("default")
        table = owner.attrs.setdefault("#defaults", {})
        table[dest] = default.const if default is not None and default.is_known else None


def _string(c: KnownCall) -> Value:
    values = [c.owner, *c.values]
    if c.name in _OF_TEXT and not c.kwargs and all(value.is_known for value in values):
        with suppress(Exception):
            return constant(getattr(c.owner.const, c.name)(*(arg.const for arg in c.args)), mix(values))
    # A path: what it says of files may differ.
    return unknown(mix(values) | (Taint.NONE if hasattr(str, c.name) else Taint.UNKNOWN))


@known("parameters named_parameters modules named_modules children named_children buffers", of=_MODULES)
def _parts(c: KnownCall) -> Value:
    deps = c.owner.deps | {c.owner}
    part = unknown(Taint.NONE, deps)
    if c.name.startswith("named"):
        part = sequence((unknown(Taint.NONE), part), "tuple")
    return Value("list", deps=deps, attrs={"#element": part})


@known("state_dict", of=_MODULES)
def _state_dict(c: KnownCall) -> Value:
    if c.owner.kind == "fsdp":
        c.run.emit("coll", c.node, op="state_dict", via="state", model=c.owner)
    return Value("state", ref=c.owner, deps=c.owner.deps | {c.owner})


@known("requires_grad_", of=f"{_MODULES} tensor")
def _requires_grad(c: KnownCall) -> Value:
    value = c.args[0] if c.args else c.kwargs.get("requires_grad", constant(True))
    c.run.emit("requires_grad", c.node, target=c.owner, value=value)
    return c.owner


@known("to cuda cpu", of=_MODULES)
@known("to cuda", of="tensor")
def _to(c: KnownCall) -> Value:
    for one in (*c.args, *c.kwargs.values()):
        if one.kind in ("lib", "union"):
            c.run.set(c.owner.attrs, "#dtype", one)
    c.run.emit("device", c.node, device=c.pick(0, "device") or unknown())
    return c.owner


@known("step", of="optimizer scheduler scaler")
def _step(c: KnownCall) -> Value:
    what = c.owner.kind
    if what == "scaler":
        for target in c.args[0].alternatives() if c.args else ():
            c.run.emit("step", c.node, target=target, what=what, scaler=c.owner)
    elif what == "scheduler":
        c.run.emit("step", c.node, target=c.owner.ref or c.owner, what=what)
        return constant(None)
    else:
        closure = c.pick(0, "closure")
        if closure is not None and closure.kind == "func":
            c.run.call_function(closure, [], {}, c.node)
        c.run.emit("step", c.node, target=c.owner, what=what, has_closure=closure is not None)
    return unknown()


@known("scale", of="scaler")
def _scale(c: KnownCall) -> Value:
    loss = c.args[0] if c.args else unknown()
    attrs = {"#scaled": c.owner, "#mean": loss.fact("mean")}
    return Value("tensor", taint=loss.taint, deps=loss.deps, attrs=attrs, node=c.node)


@known("append extend insert add", of="list dict")
def _add(c: KnownCall) -> Value | None:
    if not c.args:
        return None
    value, items = c.args[-1], c.owner.items
    added = (value,) if c.name != "extend" else known_items(value)
    if c.name == "extend":
        value = c.run.element(value, 0)
    new = (*items, *added) if items is not None and added is not None else None
    c.run.set(c.owner.attrs, "#items", None if c.run.loops else new)  # how often is not known
    old = c.owner.fact("element")
    c.run.set(c.owner.attrs, "#element", value if old is None else join(old, value))
    c.run.set(c.owner.attrs, "#taint", c.owner.taint | value.taint)
    c.owner.deps |= value.deps
    if value.kind in ("model", "ddp", "fsdp", "optimizer"):
        c.owner.deps |= {value}
    return constant(None)


@known("clear pop popleft remove update setdefault", of="list dict")
def _change(c: KnownCall) -> Value:
    if c.name == "pop" and (found := _of_dict(c)) is not None:
        return found
    c.run.set(c.owner.attrs, "#items", None)
    if c.name == "update":
        c.run.set(c.owner.attrs, "#entries", None)
    return c.run.element(c.owner, 0)  # type: ignore[no-any-return]


@known("get items values", of="dict")
def _of_dict(c: KnownCall) -> Value | None:
    entries = c.owner.fact("entries")
    if c.name in ("get", "pop") and c.args and c.args[0].is_known and entries is not None:
        default = c.args[1] if len(c.args) > 1 else constant(None)
        found: Value = entries.get(str(c.args[0].const), default)
        return found
    if c.name == "items":
        part = sequence((unknown(Taint.NONE), c.run.element(c.owner, 0)), "tuple")
        return Value("list", taint=c.owner.taint, deps=c.owner.deps, attrs={"#element": part})
    return sequence(entries.values()) if c.name == "values" and entries is not None else None


def copied(value: Value, *without: str) -> Value:
    """Return another object of which the same is known."""
    attrs = {name: fact for name, fact in value.attrs.items() if name not in without}
    return Value(value.kind, value.const, value.taint, value.ref, value.deps, value.node, attrs)


@known("detach", of="tensor")
def _detach(c: KnownCall) -> Value:
    if c.owner.deps:
        return Value("tensor", taint=c.owner.taint, node=c.owner.node, attrs={**c.owner.attrs})
    return c.owner


@known("get pop setdefault", of="environ")
def _variable(c: KnownCall) -> Value | None:
    if not c.args:
        return None
    default = c.args[1] if len(c.args) > 1 else constant(None)
    return read_environment(c.run, c.owner, c.args[0], None if c.name == "setdefault" else default)


@known("prepare", of="accelerator")
def _prepare(c: KnownCall) -> Value:
    escape(c.run, c.args)
    ready = [unknown(deps=arg.deps) for arg in c.args]
    return ready[0] if len(ready) == 1 else sequence(ready, "tuple")


def enter(run: Any, value: Value) -> Callable[[], None]:
    """Enter a context; return what leaves it."""
    if value.of_kind("no_sync"):
        run.no_sync.append(value)
        return run.no_sync.pop  # type: ignore[no-any-return]
    state = "num_joins" if value.of_kind("join") else "no_grad" if value.kind == "no_grad" else ""
    if not state:
        return lambda: None
    before = getattr(run, state)
    setattr(run, state, before + 1)
    return partial(setattr, run, state, before)


@known("enter_context push", of="holder")
def _enter_context(c: KnownCall) -> Value | None:
    if not c.args:
        return None
    enter(c.run, Value("union", ref=(c.args[0], unknown())))
    return c.args[0].attrs.get("#as", c.args[0])  # type: ignore[no-any-return]


@known("shard map filter shuffle with_format select remove_columns take skip batched", of="dataset")
def _dataset(c: KnownCall) -> Value:
    result = make(c.run, "dataset", c.node, [c.owner, *c.values])
    index, count = c.pick(1, "index"), c.pick(0, "num_shards")
    if c.name != "shard":
        result.attrs["#iterable"] = c.owner.fact("iterable")
    elif index is not None and count is not None and Taint.RANK & index.taint:
        result.attrs["#split"] = True
    return result


_OWN_STEP = Value("list", attrs={"#element": unknown(Taint.LOCAL), "#own_step": True})


# Kinds of owners, names of methods, and what they return.
_SIMPLE: tuple[tuple[str, str, Handler], ...] = (
    (_MODULES, "half bfloat16 float double train eval apply", lambda c: c.owner),
    (_MODULES, "clip_grad_norm_", lambda c: c.tell("clip", unknown(), deps=c.owner.deps | {c.owner})),
    (_MODULES, "no_sync", lambda c: Value("no_sync", ref=c.owner)),
    ("own", "loader", lambda c: Value("list", attrs={"#element": _OWN_STEP})),
    (
        "own",
        "save resume evaluate whole_state barrier broadcast_object",
        lambda c: c.tell("coll", unknown(Taint.NONE), op=c.name, via="framework"),
    ),
    ("ddp", "join", lambda c: Value("join")),
    ("file", "write writelines", lambda c: c.tell("save", unknown(), target=c.owner.ref)),
    ("optimizer", "state_dict", lambda c: Value("state", ref=c.owner)),
    ("optimizer", "load_state_dict", lambda c: unknown()),
    ("accelerator scaler", "*", lambda c: unknown()),
    ("scheduler", "get_last_lr", lambda c: unknown(Taint.NONE)),
    ("list dict", "sort reverse", lambda c: c.run.element(c.owner, 0)),
    ("tensor", "contiguous flatten view", lambda c: c.owner),
    ("tensor", "data_ptr", lambda c: unknown()),
    ("mesh", "get_rank", lambda c: place_value(c.run, "rank")),
    ("mesh", "get_coordinate get_local_rank", lambda c: unknown(Taint.RANK)),
    ("mesh", "get_group", lambda c: make(c.run, "group", c.node)),
    ("mesh", "size", lambda c: unknown(Taint.NONE)),
    ("mesh", "*", lambda c: Value("mesh")),
    ("iterator", "set_description set_postfix update", lambda c: c.owner),
    ("dataset", "train_test_split", lambda c: Value("dict", attrs={"#element": c.owner})),
    ("scaler", "update", lambda c: constant(None)),
    (_MODULES, "forward __call__", forward),
    (
        _MODULES,
        "load_state_dict",
        lambda c: c.tell("load_state", unknown(), model=c.owner, state=c.pick(0, "state_dict")),
    ),
    (_MODULES, _OWN_SYNC, lambda c: c.note("own_sync", True, constant(None))),
    ("optimizer", "add_param_group", lambda c: c.note("regrouped", True, constant(None))),
    ("tensor", "register_post_accumulate_grad_hook register_hook", lambda c: c.tell("grad", None)),
    ("generator", "manual_seed", lambda c: c.note("seeded", mix(c.args), c.owner)),
    ("tensor", "item", lambda c: Value(taint=c.owner.taint, node=c.owner.node)),
    (
        "accelerator",
        "wait_for_everyone gather gather_for_metrics reduce",
        lambda c: c.tell("coll", unknown(Taint.NONE), op=f"accelerator.{c.name}", via="framework"),
    ),
    ("loader sampler", "set_epoch", lambda c: c.tell("set_epoch", constant(None), target=c.owner)),
    ("scaler", "unscale_", lambda c: c.tell("unscale", constant(None), scaler=c.owner)),
    (
        "state loaded",
        "*",
        lambda c: (
            unknown(c.owner.taint, c.owner.deps) if c.name in ("items", "keys", "values") else copied(c.owner)
        ),
    ),
)
for _kinds, _names, _handler in _SIMPLE:
    known(_names, _kinds)(_handler)
