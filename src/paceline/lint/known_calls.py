"""Functions of libraries and of Python that mean something for a training on several ranks."""

from __future__ import annotations

import builtins
from contextlib import suppress
from functools import partial

from paceline.lint import methods
from paceline.lint.facts import (
    Handler,
    KnownCall,
    buffers_of,
    deps_of,
    inherit,
    join_items,
    known,
    known_items,
    known_length,
    make,
    take_slice,
)
from paceline.lint.values import UNKNOWN, Taint, Value, canonical, constant, mix, sequence, unknown

_OF_CONSTANTS = ("int", "str", "float", "bool", "min", "max", "abs", "sum", "round", "any", "all")
_WRAPPERS = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "DataParallel": "dp"}


@known("dist.init_process_group")
def call_init(c: KnownCall) -> Value:
    backend = c.pick(0, "backend")
    c.run.initialized, c.run.is_assumed = True, False
    given = {"world": c.pick(3, "world_size"), "rank": c.pick(4, "rank")}
    return c.tell("init", constant(None), backend=backend, method=c.pick(1, "init_method"), **given)


@known("dist.get_rank dist.get_world_size")
@known("size rank", of="group")
def call_rank(c: KnownCall) -> Value:
    group = c.owner if c.owner.kind == "group" else c.pick(0, "group")
    is_size = c.name in ("size", "get_world_size")
    if group is None or group.is_none:
        return methods.place_value(c.run, "world" if is_size else "rank")
    members = group.fact("members")
    if members is None:
        return unknown(Taint.NONE if is_size else Taint.RANK)
    if is_size:
        return constant(len(members))
    rank = c.run.place.rank
    return constant(members.index(rank) if rank in members else -1, Taint.RANK)


@known("dist.is_initialized dist.is_available")
def call_true_if_initialized(c: KnownCall) -> Value:
    if c.run.initialized or c.name != "is_initialized":
        return constant(True)
    return unknown(Taint.NONE) if c.run.num_unread_calls or c.run.initialized is None else constant(False)


@known("dist.new_group dist.split_group")
def call_new_group(c: KnownCall) -> Value:
    ranks = c.pick(0, "ranks")
    members: tuple[int, ...] | None = None
    if ranks is None or ranks.is_none:
        members = tuple(range(c.run.place.world))
    else:
        items = known_items(ranks)
        if items is not None and all(item.is_known and isinstance(item.const, int) for item in items):
            members = tuple(item.const for item in items)
    if "use_local_synchronization" not in c.kwargs:
        c.run.emit("coll", c.node, op=c.name, via="group")
    return make(c.run, "group", c.node, members=members)


@known("dist.init_device_mesh mesh.init_device_mesh mesh.DeviceMesh")
def call_mesh(c: KnownCall) -> Value:
    c.run.emit("coll", c.node, op=c.name, via="group")
    c.run.initialized = True
    shape = c.pick(1, "mesh_shape")
    return make(c.run, "mesh", c.node, axes=len((shape.items if shape is not None else None) or ()))


@known("parallel.DistributedDataParallel parallel.DataParallel fsdp.FullyShardedDataParallel")
def call_wrap(c: KnownCall) -> Value:
    model = c.pick(0, "module") or unknown()
    kind = _WRAPPERS[c.name]
    value = make(c.run, kind, c.node)
    value.attrs["module"] = model
    value.deps = frozenset()
    for name in ("find_unused_parameters", "broadcast_buffers", "use_orig_params"):
        given = c.kwargs.get(name)
        value.attrs["#" + name] = None if given is None else bool(given.const) if given.is_known else "?"
    strategy = c.kwargs.get("sharding_strategy")
    value.attrs["#is_whole"] = strategy is not None and (strategy.kind != "lib" or "NO_SHARD" in strategy.ref)
    group = c.kwargs.get("process_group")
    value.attrs["#group"] = group if group is not None and not group.is_none else None
    for one in model.alternatives():
        if one.kind == "model":
            c.run.set(one.attrs, "#wrapped", value)
    c.run.emit("wrap", c.node, wrapper=value, module=model, what=kind)
    ids = c.pick(1, "device_ids") if kind == "ddp" else None
    for one in (ids.items or ()) if ids is not None else ():
        c.run.emit("device", c.node, device=one)
    return value


@known("fsdp.fully_shard dtensor.parallelize_module dtensor.distribute_module")
def call_fully_shard(c: KnownCall) -> Value:
    model = c.pick(0, "module") or unknown()
    mesh = c.kwargs.get("mesh") or c.pick(1, "device_mesh")
    of_all = c.name == "fully_shard"
    if mesh is not None:
        of_all = mesh.fact("axes") == 1 or (of_all and mesh.fact("axes") and mesh.fact("axis") is None)
    for one in model.alternatives():
        c.run.set(one.attrs, "#sharded", c.name)
        c.run.set(one.attrs, "#group", None if of_all else c.node)
        c.run.emit("shard", c.node, model=one)
    return model


@known("data.DataLoader")
def call_loader(c: KnownCall) -> Value:
    defaults = {"dataset": unknown(), "batch_size": constant(1), "num_workers": constant(0)}
    names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
    given = {n: c.pick(i, n) or defaults.get(n) or constant(None) for i, n in enumerate(names)}
    sampler, batch_sampler = given["sampler"], given["batch_sampler"]
    value = make(c.run, "loader", c.node, [given["dataset"]])
    value.deps = frozenset()
    if sampler.is_known and batch_sampler.kind:
        sampler = batch_sampler.attrs.get("sampler", batch_sampler)
    value.attrs |= {"sampler": sampler, "dataset": given["dataset"], "batch_size": given["batch_size"]}
    value.attrs["batch_sampler"] = Value("holder", attrs={"sampler": sampler})
    for one in given["dataset"].alternatives():
        method = one.ref.method("__iter__") if one.kind == "dataset" and one.script_class else None
        if method is not None:
            made = partial(c.run.call_function, method, [], {}, c.node, owner=one)
            inherit(value, [c.run.into([], made)])  # its own events are those of the loop
    drops = c.pick(8, "drop_last")
    if drops is not None and drops.const is not False:
        value.attrs.pop("#uneven", None)
    return c.tell("loader", value, loader=value, extra="**" in c.kwargs, **given)


@known("data.DistributedSampler data.RandomSampler data.SequentialSampler data.BatchSampler")
@known("data.WeightedRandomSampler data.SubsetRandomSampler")
def call_sampler(c: KnownCall) -> Value:
    dataset = c.pick(0, "dataset") or unknown()
    if c.name != "DistributedSampler":
        if c.name == "BatchSampler" and dataset.kind == "sampler":
            return make(c.run, "sampler", c.node, sampler=dataset, distributed=dataset.fact("distributed"))
        return make(c.run, "sampler", c.node, [dataset], distributed=False)
    value = make(c.run, "sampler", c.node, [dataset], distributed=True)
    shuffle = c.pick(3, "shuffle")
    value.attrs["#shuffle"] = True if shuffle is None else bool(shuffle.const) if shuffle.is_known else None
    given = {"replicas": c.pick(1, "num_replicas"), "rank": c.pick(2, "rank")}
    return c.tell("sampler", value, sampler=value, dataset=dataset, **given)


@known("datasets.load_dataset datasets.distributed.split_dataset_by_node torchvision.datasets.*")
@known("data.TensorDataset data.Subset data.ConcatDataset data.ChainDataset data.random_split")
def call_dataset(c: KnownCall) -> Value:
    value = make(c.run, "dataset", c.node, c.values)
    value.attrs["#iterable"] = c.is_set("streaming") or c.name == "ChainDataset"
    value.attrs["#read"] = True
    if c.name == "split_dataset_by_node":
        value.attrs["#split"] = True
        value.start_taint |= Taint.RANK
    if c.name == "random_split":
        generator = c.kwargs.get("generator") or (c.args[2] if len(c.args) > 2 else None)
        c.run.emit("random_split", c.node, generator=generator, seed=c.run.seed, value=value)
        source = c.args[0] if c.args else unknown()
        value.attrs["#read"] = bool(source.fact("read")) or source.kind == "dataset"
        return Value("list", taint=value.taint, attrs={"#element": value})
    return value


@known("optim.*")
def call_optimizer(c: KnownCall) -> Value:
    params = c.pick(0, "params") or unknown()
    value = make(c.run, "optimizer", c.node, [params])
    return c.tell("optimizer", value, optimizer=value)


@known("sched.*")
def call_scheduler(c: KnownCall) -> Value:
    value = make(c.run, "scheduler", c.node)
    target = c.pick(0, "optimizer")
    value.ref = target if target is not None and target.kind == "optimizer" else None
    return value


@known("amp.*")
def call_amp(c: KnownCall) -> Value:
    if c.name != "GradScaler":
        return Value("context")
    return make(c.run, "scaler", c.node, enabled=c.kwargs.get("enabled", constant(True)).const is not False)


@known("torch.load")
def call_load(c: KnownCall) -> Value:
    target = c.pick(0, "f") or unknown()
    mapped = c.pick(1, "map_location") is not None or "**" in c.kwargs
    event = c.run.emit("load", c.node, target=target, mapped=mapped)
    return Value("loaded", taint=Taint.UNKNOWN | (target.taint & Taint.RANK), attrs={"#event": event})


@known("torch.device torch.cuda.set_device")
def call_device(c: KnownCall) -> Value:
    device = c.args[0] if c.args else c.kwargs.get("device", unknown())
    index = c.args[1] if len(c.args) > 1 else None
    c.run.emit("device", c.node, device=index or device)
    return Value("device", taint=device.taint)


@known("torch.manual_seed")
def call_seed(c: KnownCall) -> Value:
    c.run.seed = mix(c.values)
    return unknown(Taint.NONE)


@known("nn.*")
def call_module(c: KnownCall) -> Value | None:
    if not c.name[:1].isupper() or c.name in ("Parameter", "Buffer", "ParameterList"):
        return None
    value = make(c.run, "model", c.node)
    value.ref = "nn." + c.name
    value.deps = frozenset()
    buffers: bool | None = c.name.startswith(("BatchNorm", "SyncBatchNorm"))
    parts = [part for arg in c.args for part in (arg.items if arg.items is not None else [arg])]
    for i, part in enumerate(parts):
        if part.kind == "model":
            value.attrs[str(i)] = part
            buffers = buffers or buffers_of(part)
        elif part.kind in ("*", "union") or (
            part.is_opaque and c.name in ("Sequential", "ModuleList", "ModuleDict")
        ):
            buffers = buffers if buffers else None
    value.attrs["#buffers"] = buffers
    seed = c.run.seed
    is_own = not c.run.num_unread_calls if seed is None else bool(seed & (Taint.RANK | Taint.LOCAL))
    value.attrs["#drawn"] = is_own
    if c.name.endswith("Loss"):
        value.attrs["#mean"] = "reduction" not in c.kwargs
    return value


@known("dcp.*")
def call_dcp(c: KnownCall) -> Value | None:
    if c.name in ("save", "load", "async_save") and "no_dist" not in c.kwargs:
        group = c.kwargs.get("process_group")
        c.run.emit("coll", c.node, op=f"checkpoint.{c.name}", via="state", group=group)
    if c.name == "StateDictOptions":
        return Value("options", attrs={"#whole": c.is_set("full_state_dict")})
    if c.name.endswith("state_dict") and c.name.startswith("get_"):
        if c.kwargs.get("options", unknown()).fact("whole"):
            c.run.emit("coll", c.node, op=c.name, via="state")
        return unknown(Taint.NONE)
    return None


@known("accelerate.Accelerator")
def call_accelerator(c: KnownCall) -> Value:
    c.run.initialized = True
    value, place = make(c.run, "accelerator", c.node), c.run.place
    for name, field in (("process_index", "rank"), ("local_process_index", "local_rank")):
        value.attrs[name] = methods.place_value(c.run, field)
    value.attrs["num_processes"] = methods.place_value(c.run, "world")
    value.attrs["is_main_process"] = constant(place.rank == 0, Taint.RANK)
    value.attrs["is_local_main_process"] = constant(place.local_rank == 0, Taint.RANK)
    return value


@known("paceline.Loop paceline.Trainer paceline.start")
def call_own(c: KnownCall) -> Value:
    value = make(c.run, "own", c.node)
    if c.name == "start":
        c.run.initialized = True
        value.attrs["rank"] = methods.place_value(c.run, "rank")
        value.attrs["is_main"] = constant(c.run.place.rank == 0, Taint.RANK)
    is_sharded = "shard" in str(c.kwargs.get("layout", unknown()).const)
    for one in (c.pick(0, "model") or unknown()).of_kind("model") if c.name == "Loop" and is_sharded else ():
        c.run.set(one.attrs, "#sharded", c.name)
    return value


@known("itertools.islice")
def call_islice(c: KnownCall) -> Value:
    bounds = [constant(None), *c.args[1:], constant(None), constant(None)][len(c.args) > 2 :][:3]
    return take_slice(c.run, c.args[0], Value("slice", taint=mix(bounds), ref=tuple(bounds)))


@known("mp.spawn")
def call_spawn(c: KnownCall) -> Value:
    target, count = c.pick(0, "fn") or unknown(), c.pick(2, "nprocs") or unknown()
    place, world = c.run.place, methods.place_value(c.run, "world")
    values = [methods.place_value(c.run, "rank")]
    for value in (
        c.pick(1, "args") or unknown()
    ).items or ():  # a witness's world has any number of processes
        is_count = value is count or (value.is_known and count.is_known and value.const == count.const)
        values.append(world if is_count or value.fact("devices") else value)
    if target.kind == "func":
        c.run.place, c.run.is_spawned = place.spawned(), True
        c.run.call_function(target, values, {}, c.node)
        c.run.place, c.run.is_spawned = place, False
    return unknown()


@known("builtins.*")
def call_builtin(c: KnownCall) -> Value:
    first = c.args[0] if c.args else unknown(Taint.NONE)
    if c.name == "len":
        length = known_length(first)
        return constant(length, first.taint) if length is not None else unknown(first.taint & ~Taint.LOCAL)
    if c.name in _OF_CONSTANTS:
        if c.args and all(arg.is_known for arg in c.args):
            with suppress(ValueError, TypeError):
                kept = {name: fact for name, fact in first.attrs.items() if name in ("#world", "#devices")}
                const = getattr(builtins, c.name)(*(arg.const for arg in c.args))
                return Value(const=const, taint=mix(c.args), attrs=kept)
        kind = "tensor" if any(arg.kind == "tensor" for arg in c.args) else ""
        is_same = c.name in ("int", "float") and not first.kind
        return first if is_same else Value(kind, taint=mix(c.args), deps=deps_of(c.args))
    if c.name == "print":
        c.run.emit("print", c.node, names_rank=bool(Taint.RANK & mix(c.values)))
    if c.name == "getattr":
        return unknown(first.taint | Taint.UNKNOWN, first.deps)
    if c.name == "super":
        names = list(c.run.frame.names.values())
        return Value("super", ref=c.args[1] if len(c.args) > 1 else names[0] if names else unknown())
    if c.name == "next":
        source = first.ref if first.kind == "iterator" else first
        is_batch = source is first.ref and source.kind == "loader"
        return methods.batch_of(c.run, source) if is_batch else c.run.element(source, 0)
    if c.name == "dict":
        entries = dict(c.kwargs) if not c.args else None
        return Value("dict", taint=mix(c.kwargs.values()), deps=first.deps, attrs={"#entries": entries})
    return unknown(mix(c.values), deps_of(c.args))


@known("builtins.open")
def call_open(c: KnownCall) -> Value:
    mode = c.pick(1, "mode")
    writes = mode is not None and mode.is_known and str(mode.const).startswith("w")
    return Value("file", taint=mix(c.args[:1]), ref=c.pick(0, "file") if writes else None)


@known("builtins.isinstance builtins.hasattr")
def call_is_wrapped(c: KnownCall) -> Value:
    model, what = c.args[:2] if len(c.args) == 2 else (unknown(), unknown())
    names = [canonical(part.ref).rpartition(".")[2] for part in what.items or (what,) if part.kind == "lib"]
    wanted = {_WRAPPERS.get(name) for name in names}
    if c.name == "hasattr" and what.const == "module":
        wanted = {"ddp", "fsdp", "dp"}
    if model.kind in ("model", *_WRAPPERS.values()) and wanted and None not in wanted:
        return constant(model.kind in wanted)
    return unknown(Taint.NONE)


@known("builtins.range")
def call_range(c: KnownCall) -> Value:
    value = Value("range", taint=mix(c.args), ref=tuple(c.args))
    if len(c.args) == 3:  # as a slice of what has as many elements
        stop = c.args[1]
        is_even = isinstance(stop.const, int) and stop.const % c.run.place.world == 0
        whole = Value("list", attrs={"#even": is_even or stop.fact("even")})
        inherit(value, [take_slice(c.run, whole, Value("slice", ref=value.ref))])
    return value


@known("copy.deepcopy itertools.cycle itertools.chain collections.deque builtins.list")
@known("builtins.tuple builtins.sorted builtins.reversed builtins.iter builtins.set")
def call_passes(c: KnownCall) -> Value:
    first = c.args[0] if c.args else c.kwargs.get("iterable", sequence(()))
    if c.name in ("deepcopy", "copy"):
        return methods.copied(first, "#wrapped")
    if c.name == "cycle" and first.kind != "loader":
        return Value("list", taint=first.taint, attrs={"#element": c.run.element(first, 0), "#even": True})
    if first.kind == "loader" and c.name in ("iter", "cycle", "chain"):
        c.run.emit("iterate", c.node, loader=first)
        return Value("iterator", ref=first, taint=first.taint)
    if c.name in ("list", "tuple", "sorted") and first.kind in ("range", ""):
        items = known_items(first)
        if items is None:
            return Value("list", taint=first.taint, deps=first.deps)
        return sequence(items, "tuple" if c.name == "tuple" else "list")
    if c.name in ("list", "deque", "set") and not c.args:
        return sequence(())
    return first


@known("*.tqdm builtins.enumerate")
def call_wrapped(c: KnownCall) -> Value:
    source = c.pick(0, "iterable") or sequence(())
    kind = "enumerate" if c.name == "enumerate" else "iterator"
    value = Value(kind, ref=source, taint=source.taint, deps=source.deps)
    inherit(value, [source])
    return value


_SIMPLE: dict[str, Handler] = {
    "torch.tensor torch.as_tensor torch.Tensor": lambda c: Value(
        "tensor",
        taint=mix(c.args[:1]),
        deps=deps_of(c.args[:1]),
        node=c.node,
        attrs={"#dtype": c.kwargs.get("dtype")},
    ),
    "builtins.zip": lambda c: Value("zip", ref=tuple(c.args), taint=mix(c.args)),
    "torch.cuda.synchronize": lambda c: c.tell("sync", constant(None)),
    "torch.cuda.Event": lambda c: c.tell("clock", unknown(), is_timer=True),
    "torch.set_num_threads": lambda c: c.tell("threads", constant(None)),
    "dist.destroy_process_group": lambda c: c.tell("destroy", constant(None)),
    "itertools.count itertools.repeat": lambda c: Value("list", attrs={"#element": unknown(), "#even": True}),
    "torch.save": lambda c: c.tell("save", constant(None), value=c.pick(0, "obj"), target=c.pick(1, "f")),
    "torch.cuda.device": lambda c: Value("context", attrs={"#as": call_device(c)}),
    "dist.get_node_local_rank": lambda c: methods.place_value(c.run, "local_rank"),
    "nnutils.clip_grad_norm_ nnutils.clip_grad_value_": lambda c: c.tell(
        "clip", unknown(Taint.NONE), deps=deps_of(c.args[:1]), is_norm=c.name == "clip_grad_norm_"
    ),
    "torch.no_grad torch.inference_mode": lambda c: Value("no_grad"),
    "torch.autocast contextlib.nullcontext contextlib.suppress": lambda c: Value("context"),
    "contextlib.ExitStack": lambda c: Value("holder", attrs={"sampler": constant(None)}),
    "torch.Generator": lambda c: make(c.run, "generator", c.node),
    "torch.cuda.device_count": lambda c: constant(c.run.place.local_world, devices=not c.run.is_spawned),
    "nn.convert_sync_batchnorm torch.compile": lambda c: join_items(c.args[:1]),
    "join.Join": lambda c: Value("join"),
    "functools.lru_cache": lambda c: Value("lib", ref="functools.lru_cache"),
    "functools.partial": lambda c: Value("partial", ref=(c.args[0], c.args[1:], dict(c.kwargs))),
    "argparse.ArgumentParser": lambda c: Value(attrs={"#defaults": {}}),
    "os.getenv": lambda c: methods.read_environment(
        c.run, c.run.environ, c.args[0], c.args[1] if len(c.args) > 1 else constant(None)
    ),
    "os.path.join pathlib.Path": lambda c: Value(
        const="/".join(str(arg.const) for arg in c.args) if all(arg.is_known for arg in c.args) else UNKNOWN,
        taint=mix(c.args),
    ),
    "io.BytesIO": lambda c: Value("buffer"),
    "sys.exit os._exit builtins.exit builtins.quit": lambda c: Value("never"),
    "*.trange": lambda c: Value("iterator", ref=Value("range", ref=tuple(c.args), taint=mix(c.args))),
}
for _names, _handler in _SIMPLE.items():
    known(_names)(_handler)
