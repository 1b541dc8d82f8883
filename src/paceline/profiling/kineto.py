"""Reads one trace file of torch.profiler (Chrome's JSON format, plain or gzipped) into columns.

Only the arguments of collectives are decoded; all others stay bytes, which makes a file of 100 MB readable in
a second. Files come from anywhere, so every error in them becomes one PL900.
"""

from __future__ import annotations

import gzip
import re
import types
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, import_optional
from paceline.phrases import first_line
from paceline.profiling.rank.loop_phases import METADATA
from paceline.profiling.rank_trace import Reducer
from paceline.reading import open_file

MOST_BYTES = 2 << 30
"""Text of a trace beyond this is refused: it is decoded as a whole, in about as much memory again."""
_LARGEST_NS = 4e18


class EventKind(IntEnum):
    """The kinds of events that the analysis distinguishes; events of other kinds are dropped."""

    OPERATOR = 1
    WRAPPER = 2
    """Of an operator in backward; it contains the operators that compute, and code of hooks."""
    ITEM = 3
    CALL = 4
    """The call that issues a collective on CPU."""
    COLLECTIVE = 5
    """A collective under way: gloo's span, or NCCL's kernel."""
    KERNEL = 6
    OPTIMIZER = 7
    DATA = 8
    STEP = 9
    FUNCTION = 10
    """Of autograd, in Python: unlike an operator, it may contain anything."""
    ENTRY = 11
    """The forward of a module that torch's DDP or FSDP wraps."""
    LAYER = 13
    """An operator that few call outside of a module's forward."""
    ENDING = 12
    """Work of DDP or FSDP at the end of a backward, after their collectives."""
    REPLAY = 14
    """The launch of a CUDA graph; what it runs was recorded before, and has no operators."""
    COPY = 15
    """A copy or a fill of memory, on the device."""
    SYNC = 16
    """A call in which the host waits for the device."""


@dataclass(frozen=True)
class Recorded:
    """The facts that Paceline's recorder adds to the events of a trace.

    Attributes:
        steps: number, begin and end of each.
        calls: of collectives, in order of issue: instant, group, number, operation and bytes of input.
        slowdown: how much longer a step took while it was recorded.
        host: identifies the machine and its start.
        partial: a sentence on why steps are missing; empty if none is.
        members: the global ranks of the rank's process groups, by name.
        loop: spans of the training loop by phase, and of its waiting.
        samples: of the training loop: instant and number of a place.
        collections: of garbage: begin, end and number of a place.
        places: file, line, function and module.
        scheduling: instants, and for how long the training loop had run, and waited for a core.
        reducers: of each DDP module.
        call_places: of each call, the number of the place that issued it; -1 if unknown.
    """

    steps: list[tuple[int, int, int]]
    calls: list[tuple[int, str, int, str, int]]
    slowdown: float | None = None
    host: str = ""
    partial: str = ""
    members: dict[str, list[int]] = field(default_factory=dict)
    loop: dict[str, list[tuple[int, int]]] | None = None
    samples: list[tuple[int, int]] = field(default_factory=list)
    collections: list[tuple[int, int, int]] = field(default_factory=list)
    places: list[tuple[str, int, str, str]] = field(default_factory=list)
    call_places: list[int] = field(default_factory=list)
    scheduling: list[tuple[int, int, int]] = field(default_factory=list)
    reducers: list[Reducer] = field(default_factory=list)


@dataclass
class TraceFile:
    """The events of one file in columns, in no order.

    Attributes:
        begins_ns, ends_ns: since 1970, or since an unknown instant in old files.
        threads: a number per thread or stream.
        arguments: by event, JSON of collectives and of the calls that issue them.
        rank: `None` if the file does not have it.
        world_size: 0 if unknown.
        host: empty if unknown.
        groups: the ranks of each process group; empty if unknown.
        recorded: what Paceline's recorder has added, if it made the file.
        has_replays: whether CUDA graphs were launched; these launches are no events here.
    """

    path: Path
    kinds: NDArray[np.int8]
    begins_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    threads: NDArray[np.int32]
    names: list[str]
    arguments: dict[int, bytes] = field(default_factory=dict)
    rank: int | None = None
    world_size: int = 0
    host: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    recorded: Recorded | None = None
    has_replays: bool = False


def trace_error(path: Path, reason: str) -> PacelineError:
    """Return the error for a file that is no readable trace: PL900."""
    return PacelineError(
        "PL900",
        saw=f"{path}: {reason}.",
        rule="A trace is what torch.profiler exports: JSON with a list traceEvents, plain or gzipped.",
        fix="Record it again with --profile or prof.export_chrome_trace(...), or leave the file out.",
    )


def read_trace_file(path: Path) -> TraceFile:
    """Return the events of a file."""
    msgspec = import_msgspec()
    events_type, file_type = _define_structs()
    try:
        with ExitStack() as stack:
            data = _open(path, stack).read(MOST_BYTES + 1)
        head = data[:1024].strip()[:1]
        if not head and not data.strip():
            raise trace_error(path, "it is empty")
        if len(data) > MOST_BYTES:
            raise trace_error(path, f"its text has more than {MOST_BYTES:,} bytes")
        if head == b"[":
            table = file_type(traceEvents=msgspec.json.decode(data, type=events_type))
        else:
            table = msgspec.json.decode(data, type=file_type)
        return _build(path, table)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise trace_error(path, _describe(error)) from None
    except MemoryError:
        raise trace_error(path, "its events do not fit into memory") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise trace_error(path, f"its gzip is damaged ({first_line(error)})") from None
    except OSError as error:
        raise trace_error(path, error.strerror or first_line(error)) from None


def decode_arguments(data: bytes) -> dict[str, Any]:
    """Return an event's arguments; empty if they are not a table."""
    msgspec = import_msgspec()
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def import_msgspec() -> types.ModuleType:
    """Return the module; raise PL901 if it is not installed."""
    use = "It reads traces, and training does not need it."
    return import_optional("msgspec", "paceline[profile]", use)


def _open(path: Path, stack: ExitStack) -> BinaryIO:
    """Open the text of a trace, unpacked if it is gzipped."""
    file = stack.enter_context(open_file(path))
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file))) if is_packed else file


def _describe(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return f"it is cut off or not the JSON of a trace ({first_line(error)})"


_structs: tuple[Any, Any] | None = None


def _define_structs() -> tuple[Any, Any]:
    """Return the types to decode into, made once: msgspec is imported only where a trace is read."""
    global _structs
    if _structs is None:
        msgspec = import_msgspec()
        event = msgspec.defstruct(
            "event",
            [
                ("ph", str, ""),
                ("cat", str, ""),
                ("name", str, ""),
                ("pid", int | float | str | None, None),
                ("tid", int | float | str | None, None),
                ("ts", float, 0.0),
                ("dur", float, 0.0),
                ("args", msgspec.Raw, msgspec.Raw(b"{}")),
            ],
            gc=False,
        )
        events = types.GenericAlias(list, (event,))
        file = msgspec.defstruct(
            "file",
            [
                ("traceEvents", events),
                ("baseTimeNanoseconds", int, 0),
                ("host_name", str, ""),
                ("distributedInfo", dict[str, Any], msgspec.field(default_factory=dict)),
                (METADATA, Recorded | None, None),
            ],
        )
        _structs = events, file
    return _structs


def _build(path: Path, table: Any) -> TraceFile:
    kinds: list[int] = []
    threads: list[int] = []
    spans: list[tuple[float, float]] = []
    names: list[str] = []
    arguments: dict[int, bytes] = {}
    has_replays = False
    # One string per name: each event was decoded with its own.
    known: dict[tuple[str, str], tuple[EventKind | None, str]] = {}
    numbers: dict[tuple[object, object], int] = {}
    for event in table.traceEvents:
        if event.ph != "X":
            continue
        key = event.cat, event.name
        if key not in known:
            known[key] = _classify(*key), event.name
        kind, name = known[key]
        has_replays |= kind == EventKind.REPLAY
        if kind is None or kind == EventKind.REPLAY:
            continue
        if kind in (EventKind.COLLECTIVE, EventKind.CALL):
            arguments[len(kinds)] = bytes(event.args)
        kinds.append(kind)
        threads.append(numbers.setdefault((event.pid, event.tid), len(numbers)))
        names.append(name)
        spans.append((event.ts, event.dur))
    times = np.array(spans, dtype=np.float64).reshape(-1, 2)
    base = table.baseTimeNanoseconds
    with np.errstate(over="ignore", invalid="ignore"):
        sane = np.isfinite(times).all() and (np.abs(times) < _LARGEST_NS / 1e3).all()
        sane = sane and (times[:, 1] >= 0).all() and abs(base) < _LARGEST_NS
    if not sane:
        raise trace_error(path, "an event has a negative duration or a time beyond all years")
    # A time of day in nanoseconds is rounded to 256 of them; in microseconds it is exact.
    origin = int(times[:, 0].min()) if len(times) else 0
    begins = np.round((times[:, 0] - origin) * 1e3).astype(np.int64) + origin * 1000 + base
    info, recorded = table.distributedInfo, getattr(table, METADATA)
    rank, world_size = info.get("rank"), info.get("world_size")
    return TraceFile(
        path=path,
        kinds=np.array(kinds, dtype=np.int8),
        begins_ns=begins,
        ends_ns=begins + np.round(times[:, 1] * 1e3).astype(np.int64),
        threads=np.array(threads, dtype=np.int32),
        names=names,
        arguments=arguments,
        rank=rank if _is_count(rank) else _rank_of_name(path),
        world_size=world_size if _is_count(world_size) else 0,
        host=recorded.host if recorded is not None else table.host_name,
        groups=_read_groups(info),
        recorded=recorded,
        has_replays=has_replays,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _rank_of_name(path: Path) -> int | None:
    found = re.search(r"rank[-_.]?(\d{1,9})(?!\d)", path.name)
    return int(found[1]) if found else None


def _read_groups(info: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    groups = info.get("pg_config")
    if not isinstance(groups, list):
        return ()
    ranks = [group.get("ranks") for group in groups if isinstance(group, dict)]
    return tuple(tuple(each) for each in ranks if isinstance(each, list) and all(map(_is_count, each)))


# What an event is, by the beginning of its name, for the categories of torch's profiler.
_OPERATORS: tuple[tuple[str, EventKind | None], ...] = (
    ("autograd::engine::evaluate_function", EventKind.WRAPPER),
    ("c10d::", EventKind.CALL),
    ("record_param_comms", None),
    ("nccl:", None),
    ("_c10d_functional::", None),  # issues or waits; the call that it makes is an event of its own
    ("torch.distributed.ddp.reducer::copy_bucket_to_grad", EventKind.ENDING),
    ("aten::item", EventKind.ITEM),
    ("aten::linear", EventKind.LAYER),
    ("aten::conv", EventKind.LAYER),
    ("aten::embedding", EventKind.LAYER),
    ("", EventKind.OPERATOR),
)
_ANNOTATIONS: tuple[tuple[str, EventKind | None], ...] = (
    ("gloo:", EventKind.COLLECTIVE),
    ("nccl:", None),  # the host's side; the kernel is what counts
    ("Optimizer.", EventKind.OPTIMIZER),
    ("enumerate(DataLoader)", EventKind.DATA),
    ("ProfilerStep#", EventKind.STEP),
    ("DistributedDataParallel.forward", EventKind.ENTRY),
    ("FSDP::root_pre_forward", EventKind.ENTRY),
    ("FSDP::pre_forward", EventKind.ENTRY),
    ("FSDP::root_post_backward", EventKind.ENDING),
    # A script names its annotations as it likes, and may put one around all of its loop.
)
_KERNELS: tuple[tuple[str, EventKind | None], ...] = (("nccl", EventKind.COLLECTIVE), ("", EventKind.KERNEL))
_RUNTIME: tuple[tuple[str, EventKind | None], ...] = tuple(
    (f"{maker}{call}", kind)
    for maker in ("cuda", "cu", "hip")
    for call, kind in (
        ("GraphLaunch", EventKind.REPLAY),
        ("StreamSynchronize", EventKind.SYNC),
        ("DeviceSynchronize", EventKind.SYNC),
        ("CtxSynchronize", EventKind.SYNC),
        ("EventSynchronize", EventKind.SYNC),
    )
)
_COPIES: tuple[tuple[str, EventKind | None], ...] = (("", EventKind.COPY),)
_CATEGORIES: dict[str, tuple[tuple[str, EventKind | None], ...]] = {
    "cpu_op": _OPERATORS,
    "operator": _OPERATORS,
    "user_annotation": _ANNOTATIONS,
    "cuda_runtime": _RUNTIME,
    "cuda_driver": _RUNTIME,
    "gpu_memcpy": _COPIES,
    "gpu_memset": _COPIES,
    "kernel": _KERNELS,
    "gpu_op": _KERNELS,
}


def _classify(category: str, name: str) -> EventKind | None:
    for beginning, kind in _CATEGORIES.get(category.lower(), ()):
        if name.startswith(beginning):
            return EventKind.FUNCTION if kind == EventKind.OPERATOR and "::" not in name else kind
    return None
