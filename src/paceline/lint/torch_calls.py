"""Functions of torch that mean something for a training on several ranks."""

from __future__ import annotations

import ast

from paceline.lint import methods
from paceline.lint.facts import Handler, KnownCall, buffers_of, join_items, known, known_items, make
from paceline.lint.values import Taint, Value, constant, mix, unknown


@known("dist.init_process_group")
def call_init(c: KnownCall) -> Value:
    backend = c.pick(0, "backend")
    c.run.backend = str(backend.const) if backend is not None and backend.is_known else c.run.backend
    c.run.initialized, c.run.is_assumed = True, False
    if "device_id" in c.kwargs:
        c.run.device_set = True
    c.run.emit(
        "init",
        c.node,
        backend=backend,
        world=c.kwargs.get("world_size"),
        rank=c.kwargs.get("rank"),
        timeout=c.kwargs.get("timeout"),
        method=c.pick(1, "init_method"),
    )
    return constant(None)


@known("dist.get_rank dist.get_world_size dist.get_node_local_rank")
def call_rank(c: KnownCall) -> Value:
    group = c.pick(0, "group")
    if c.name in ("get_node_local_rank",):
        return methods.place_value(c.run, "local_rank")
    if group is not None and not group.is_none:
        members = group.fact("members")
        if members is None:
            return unknown(Taint.RANK if c.name == "get_rank" else Taint.NONE)
        if c.name == "get_world_size":
            return constant(len(members))
        return constant(members.index(c.run.place.rank) if c.run.place.rank in members else -1, Taint.RANK)
    return methods.place_value(c.run, "rank" if c.name == "get_rank" else "world")


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
    local = c.kwargs.get("use_local_synchronization")
    if local is None or (local.is_known and not local.const):
        c.run.emit("coll", c.node, op=c.name, via="group", members=members)
    c.run.emit("init", c.node, timeout=c.pick(1, "timeout"), is_group=True)
    return make(c.run, "group", c.node, members=members)


@known("dist.init_device_mesh mesh.init_device_mesh mesh.DeviceMesh")
def call_mesh(c: KnownCall) -> Value:
    c.run.emit("coll", c.node, op=c.name, via="group")
    c.run.initialized = True
    return make(c.run, "mesh", c.node)


@known("parallel.DistributedDataParallel parallel.DataParallel fsdp.FullyShardedDataParallel")
def call_wrap(c: KnownCall) -> Value:
    model = c.pick(0, "module") or unknown()
    kind = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "DataParallel": "dp"}[
        c.name
    ]
    value = make(c.run, kind, c.node)
    value.attrs["module"] = model
    value.deps = frozenset()
    for name in ("find_unused_parameters", "broadcast_buffers", "static_graph", "use_orig_params"):
        given = c.kwargs.get(name)
        value.attrs["#" + name] = None if given is None else bool(given.const) if given.is_known else "?"
    group = c.kwargs.get("process_group")
    value.attrs["#group"] = group if group is not None and not group.is_none else None
    for one in model.alternatives():
        if one.kind == "model":
            c.run.set(one.attrs, "#wrapped", value)
    c.run.emit(
        "wrap",
        c.node,
        wrapper=value,
        module=model,
        device_set=c.run.device_set,
        devices=c.pick(1, "device_ids"),
        initialized=c.run.is_started,
        unread=c.run.num_unread_calls,
        backend=c.run.backend,
        what=kind,
        extra="**" in c.kwargs,
        device_id=c.kwargs.get("device_id"),
    )
    ids = c.pick(1, "device_ids") if kind == "ddp" else None
    for one in (ids.items or ()) if ids is not None else ():
        c.run.emit("device", c.node, device=one, limit=c.run.place.local_world)
    return value


@known("fsdp.fully_shard")
def call_fully_shard(c: KnownCall) -> Value:
    model = c.pick(0, "module") or unknown()
    for one in model.alternatives():
        c.run.set(one.attrs, "#sharded", c.node)
        c.run.emit("shard", c.node, model=one)
    return model


@known("data.DataLoader")
def call_loader(c: KnownCall) -> Value:
    dataset = c.pick(0, "dataset") or unknown()
    sampler = c.pick(3, "sampler") or constant(None)
    batch_sampler = c.pick(4, "batch_sampler") or constant(None)
    shuffle = c.pick(2, "shuffle") or constant(None)
    workers = c.pick(5, "num_workers") or constant(0)
    value = make(c.run, "loader", c.node, [dataset])
    value.deps = frozenset()
    value.attrs["sampler"] = (
        sampler
        if not (sampler.is_known and batch_sampler.kind)
        else batch_sampler.attrs.get("sampler", batch_sampler)
    )
    value.attrs["dataset"] = dataset
    value.attrs["batch_size"] = c.pick(1, "batch_size") or constant(1)
    c.run.emit(
        "loader",
        c.node,
        loader=value,
        dataset=dataset,
        sampler=sampler,
        batch_sampler=batch_sampler,
        shuffle=shuffle,
        workers=workers,
        extra="**" in c.kwargs,
        unread=c.run.num_unread_calls,
        args=c.values,
    )
    return value


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
    c.run.emit(
        "sampler",
        c.node,
        sampler=value,
        dataset=dataset,
        replicas=c.pick(1, "num_replicas"),
        rank=c.pick(2, "rank"),
    )
    return value


@known("datasets.load_dataset datasets.distributed.split_dataset_by_node torchvision.datasets.*")
@known("data.TensorDataset data.Subset data.ConcatDataset data.ChainDataset data.random_split")
def call_dataset(c: KnownCall) -> Value:
    values = c.values
    value = make(c.run, "dataset", c.node, values)
    streaming = c.kwargs.get("streaming")
    value.attrs["#iterable"] = (
        bool(streaming is not None and streaming.is_known and streaming.const) or c.name == "ChainDataset"
    )
    value.attrs["#read"] = True
    if c.name == "split_dataset_by_node":
        value.attrs["#split"] = True
        value.start_taint |= Taint.RANK
    if c.name == "random_split":
        generator = c.kwargs.get("generator") or (c.args[2] if len(c.args) > 2 else None)
        c.run.emit(
            "random_split",
            c.node,
            generator=generator,
            seed=c.run.seed,
            unread=c.run.num_unread_calls,
            value=value,
        )
        value.attrs["#split_draw"] = True
        source = c.args[0] if c.args else unknown()
        value.attrs["#read"] = bool(source.fact("read")) or source.kind == "dataset"
        return Value("list", taint=value.taint, attrs={"#element": value})
    return value


@known("optim.*")
def call_optimizer(c: KnownCall) -> Value:
    params = c.pick(0, "params") or unknown()
    value = make(c.run, "optimizer", c.node, [params])
    c.run.emit("optimizer", c.node, optimizer=value, params=params)
    return value


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
    enabled = c.kwargs.get("enabled")
    return make(
        c.run, "scaler", c.node, enabled=not (enabled is not None and enabled.is_known and not enabled.const)
    )


@known("torch.save")
def call_save(c: KnownCall) -> Value:
    c.run.emit("save", c.node, value=c.pick(0, "obj"), target=c.pick(1, "f"), initialized=c.run.is_started)
    return constant(None)


@known("torch.load")
def call_load(c: KnownCall) -> Value:
    target = c.pick(0, "f") or unknown()
    mapped = c.pick(1, "map_location") is not None or "**" in c.kwargs
    event = c.run.emit("load", c.node, target=target, mapped=mapped, initialized=c.run.is_started)
    return Value("loaded", taint=Taint.UNKNOWN | (target.taint & Taint.RANK), attrs={"#event": event})


@known("torch.device torch.cuda.device torch.cuda.set_device")
def call_device(c: KnownCall) -> Value:
    device = c.args[0] if c.args else c.kwargs.get("device", unknown())
    index = c.args[1] if len(c.args) > 1 else None
    c.run.emit("device", c.node, device=index or device, limit=c.run.place.local_world)
    if c.name == "set_device":
        c.run.device_set = True
        return constant(None)
    if c.name == "device" and not isinstance(c.node, ast.Call):
        return unknown()
    name = getattr(getattr(c.node, "func", None), "value", None)
    if isinstance(name, ast.Attribute) and name.attr == "cuda":
        return Value("device_context")
    word = methods.device_word(device)
    if index is not None:
        word = "own"
    return Value("device", taint=device.taint, ref=word, attrs={"#index": index or device})


@known("torch.manual_seed torch.random.manual_seed")
def call_seed(c: KnownCall) -> Value:
    c.run.seed = mix(c.values)
    c.run.emit("seed", c.node, taint=c.run.seed)
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
    if c.name.endswith("Loss"):
        value.attrs["#mean"] = "reduction" not in c.kwargs
    return value


@known("dcp.*")
def call_dcp(c: KnownCall) -> Value | None:
    whole = c.kwargs.get("options")
    if c.name in ("save", "load", "async_save"):
        no_dist = c.kwargs.get("no_dist")
        group = c.kwargs.get("process_group")
        if no_dist is None:
            c.run.emit("coll", c.node, op=f"checkpoint.{c.name}", via="state", group=group)
        return unknown()
    if c.name in ("get_model_state_dict", "get_state_dict", "get_optimizer_state_dict"):
        if whole is not None and whole.fact("whole"):
            c.run.emit("coll", c.node, op=c.name, via="state")
        return unknown(Taint.NONE)
    if c.name == "StateDictOptions":
        full = c.kwargs.get("full_state_dict")
        return Value("options", attrs={"#whole": bool(full is not None and full.is_known and full.const)})
    return None


@known("nnutils.*")
def call_clip(c: KnownCall) -> Value | None:
    if c.name in ("clip_grad_norm_", "clip_grad_value_"):
        c.run.emit("clip", c.node, deps=c.args[0].deps if c.args else frozenset())
        return unknown(Taint.NONE)
    return None


@known("accelerate.Accelerator")
def call_accelerator(c: KnownCall) -> Value:
    c.run.initialized = c.run.device_set = True
    return make(c.run, "accelerator", c.node)


def _tensor(c: KnownCall) -> Value:
    first = c.args[0] if c.args else unknown()
    return Value("tensor", taint=mix([first]), deps=first.deps, node=c.node)


_SIMPLE: dict[str, Handler] = {
    "torch.tensor torch.as_tensor torch.Tensor": _tensor,
    "torch.no_grad torch.inference_mode": lambda c: Value("no_grad"),
    "torch.autocast contextlib.nullcontext contextlib.suppress": lambda c: Value("context"),
    "contextlib.ExitStack": lambda c: Value("holder", attrs={"sampler": constant(None)}),
    "torch.Generator": lambda c: make(c.run, "generator", c.node),
    "torch.cuda.device_count": lambda c: constant(c.run.place.local_world, devices=not c.run.is_spawned),
    "nn.convert_sync_batchnorm torch.compile": lambda c: join_items(c.args[:1]),
    "join.Join": lambda c: Value("join"),
}
for _names, _handler in _SIMPLE.items():
    known(_names)(_handler)
