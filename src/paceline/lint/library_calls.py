"""Functions of libraries that mean something for a training on several ranks."""

from __future__ import annotations

from typing import Any

from paceline.lint.facts import KNOWN, KnownCall, deps_of, escape, inherit
from paceline.lint.values import Taint, Value, canonical, mix, unknown, words

# Positions of the tensor that is written, of the group and of the source or destination.
_POSITIONS = {
    "all_reduce all_gather all_gather_into_tensor all_gather_object all_gather_coalesced": (0, 2, -1),
    "all_to_all": (0, 2, -1),
    "broadcast broadcast_object_list": (0, 2, 1),
    "reduce": (0, 3, 1),
    "scatter scatter_object_list": (0, 3, 2),
    "gather gather_object": (1, 3, 2),
    "reduce_scatter reduce_scatter_tensor": (0, 3, -1),
    "all_to_all_single": (0, 4, -1),
    "barrier monitored_barrier": (-1, 0, -1),
}
COLLECTIVES = {name: place for names, place in _POSITIONS.items() for name in names.split()}
# Names of what is written, those of lists first.
_WRITTEN = "gather_list object_gather_list tensor_list output_tensor_list object_list output_tensor output"
TRANSFERS = words("send recv isend irecv batch_isend_irecv P2POp")
# What these get, they don't change, wrap or keep for training.
_HARMLESS = words("""
    torch numpy math os sys json re time random itertools functools collections pathlib logging builtins
    string operator contextlib io typing warnings shutil glob copy datetime argparse dataclasses pickle
    csv gzip tempfile socket subprocess threading gc signal traceback enum abc inspect platform uuid
    hashlib statistics types weakref queue PIL pandas scipy sklearn matplotlib yaml tqdm wandb psutil
    tensorboard torchvision tokenizers tiktoken h5py pyarrow safetensors huggingface_hub omegaconf rich
    termcolor cv2 einops tensorboardX
""")
_CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns"}
_RANDOM = words("rand randn randint randperm normal bernoulli multinomial rand_like randn_like")
_FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn"}


def call_library(call: KnownCall, name: str) -> Value:
    """Return the result of a function of a library."""
    short = canonical(name)
    head, _, last = short.rpartition(".")
    run, args, kwargs, node, values = call.run, call.args, call.kwargs, call.node, call.values
    c = KnownCall(run, args, kwargs, node, last)
    if head == "dist" and last in COLLECTIVES:
        return _collective(c)
    if head == "dnn":
        run.emit("coll", node, op=f"nn.{last}", group=kwargs.get("group"), via="")
        return Value("tensor", deps=deps_of(args), node=node)
    if head == "dist" and last in TRANSFERS:
        run.emit("transfer", node)
    if last.startswith("Schedule") and name.startswith("torch.distributed.pipelining"):
        run.emit("alike", node, what="n_microbatches", value=c.pick(1, "n_microbatches"))
    handler = KNOWN.get(short) or KNOWN.get(f"{head}.*") or KNOWN.get(f"*.{last}")
    if handler is not None:
        result = handler(c)
        if result is not None:
            return result
    root = name.partition(".")[0]
    if root not in _HARMLESS:
        escape(run, values)
        run.num_unread_calls += 1
        taint = (mix(values) & ~Taint.LOCAL) | Taint.UNKNOWN  # it may have made it the same on all ranks
        return unknown(taint, deps_of(values))
    if root == "torch" and any(value.fact("world") for value in values):
        run.emit("scaled", node)
    if last == "dump":
        for file in values:
            if file.kind == "file" and file.ref is not None:
                run.emit("save", node, target=file.ref)
    if root == "subprocess":
        run.emit("threads", node)
    taint = mix(values)
    if last in _RANDOM and root in ("torch", "numpy", "random"):
        taint |= _taint_of_draw(run, kwargs)
    elif root in ("random",) and last not in ("seed", "Random"):
        taint |= Taint.UNKNOWN
    elif root == "time" and last in _CLOCKS:
        taint |= Taint.LOCAL
        run.emit("clock", node)
    elif last in ("getpid", "gethostname", "uuid4", "node", "mkdtemp", "get_ident"):
        taint |= Taint.RANK | Taint.LOCAL
    elif root in ("subprocess", "socket", "pickle", "glob", "os", "pathlib") and last not in words(
        "join basename dirname splitext abspath expanduser Path fspath str makedirs"
    ):
        taint |= Taint.UNKNOWN
    kind = "tensor" if root == "torch" and head in ("torch", "F") else ""
    value = Value(kind, taint=taint, deps=deps_of(values), node=node)
    inherit(value, args)
    if last in _FACTORIES and root == "torch" and args and all(arg.is_known for arg in args if not arg.kind):
        value.attrs["#shape"] = _shape_of(args)
        value.attrs["#dtype"] = kwargs.get("dtype")
    if head == "F":
        reduction = kwargs.get("reduction")
        if last.endswith(("cross_entropy", "_loss", "cross_entropy_with_logits")) and reduction is None:
            value.attrs["#mean"] = True
    return value


def _shape_of(args: list[Value]) -> tuple[Any, ...] | None:
    first = args[0]
    if first.items is not None:
        shape = tuple(item.const if item.is_known else None for item in first.items)
    else:
        shape = tuple(arg.const for arg in args if arg.is_known)
    return shape if shape and all(isinstance(one, int) for one in shape) else None


def _taint_of_draw(run: Any, kwargs: dict[str, Value]) -> int:
    generator = kwargs.get("generator")
    if generator is None and run.seed is None and not run.num_unread_calls:
        return Taint.LOCAL
    seeded: int | None = run.seed if generator is None else generator.fact("seeded")
    if seeded is None or (generator is None and not Taint.RANK & seeded):
        return Taint.UNKNOWN
    return seeded | Taint.LOCAL if seeded & (Taint.RANK | Taint.LOCAL) else seeded


def _collective(c: KnownCall) -> Value:
    out_at, group_at, source_at = COLLECTIVES[c.name]
    group = c.pick(group_at, "group")
    end = "src" if c.name.startswith(("broadcast", "scatter")) else "dst"
    source = c.pick(source_at, end) if source_at >= 0 else None
    out_name = next((name for name in _WRITTEN.split() if name in c.kwargs), "tensor")
    out = c.pick(out_at, out_name) if out_at >= 0 else None
    data: dict[str, Any] = {"op": c.name, "group": group, "source": source, "via": "", "out": out}
    if c.name == "all_reduce":
        data["reduce_op"] = c.pick(1, "op")
    if out is not None:
        data["shape"] = out.fact("shape")
        owner = next(iter(out.deps)) if len(out.deps) == 1 else out  # of a gradient
        data["dtype"] = owner.fact("dtype")
    c.run.emit("coll", c.node, **data)
    is_unlike = c.name.startswith(("reduce", "gather", "scatter", "all_to_all"))
    after = Taint.UNKNOWN if is_unlike or (group is not None and not group.is_none) else Taint.NONE
    for one in out.alternatives() if out is not None else ():
        c.run.set(one.attrs, "#taint", after)
        if c.name == "all_reduce":
            c.run.set(one.attrs, "#reduced", True)
        if one.kind == "list":
            if one.items is not None:
                c.run.set(one.attrs, "#items", tuple(unknown(after) for _ in one.items))
            kind = "" if "object" in c.name else "tensor"
            c.run.set(one.attrs, "#element", Value(kind, taint=after))
    return unknown(Taint.NONE)
