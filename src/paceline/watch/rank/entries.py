"""Converts the entries that torch's Flight Recorder dumps into `Call`s."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from paceline.torch_seams.watching import find_world, list_dumps, without_inductor
from paceline.watch.protocol.frames import build_frame, is_watching
from paceline.watch.protocol.report import Call, Frame, Group
from paceline.watch.rank.operations import CallWindow, Windows, name_reduce_op

# Of gloo and whatever else records into the common recorder, then NCCL's own.
# c10's names of types to torch's.
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")

Key = tuple[int, int]
"""A recorder, and its number for a process group: unlike a name, it is never used again."""


@dataclass(frozen=True)
class Status:
    """The progress of a process group in the recorder's count, which includes sends and receives.

    Attributes:
        issued: number of the latest collective.
        completed: number of the one that completed last, which need not be the highest.
    """

    issued: int
    completed: int


@dataclass(slots=True)
class FlightEntry:
    """One collective as recorded; rarely needed fields are read from `raw` on demand.

    Attributes:
        record: counts all entries of its recorder, from 0.
        key: of its process group.
        group: the group's name.
        number: in the group's sequence.
        created_ns: since 1970.
        is_done: whether it has completed.
        raw: the recorder's dictionary.
    """

    record: int
    key: Key
    group: str
    number: int
    created_ns: int
    is_done: bool
    raw: Mapping[str, Any]

    @property
    def backend(self) -> str:
        """The name of the backend, such as `gloo`."""
        return str(self.raw["profiling_name"]).rpartition(":")[0]

    @property
    def operation(self) -> str:
        """The operation's name as users call it; see `build_call`."""
        return _name_operation(str(self.raw["profiling_name"]).rpartition(":")[2])

    @property
    def thread(self) -> int:
        """Ident of the thread that issued it; 0 if unknown."""
        return int(self.raw.get("thread_id") or 0)


def read_status() -> dict[Key, Status]:
    """Return the progress of all process groups; takes 0.01 ms."""
    found = {}
    for source, dump in list_dumps():
        for number, status in _load(dump(False, False, False)).get("pg_status", {}).items():
            enqueued, completed = status["last_enqueued_collective"], status["last_completed_collective"]
            found[source, int(number)] = Status(int(enqueued), int(completed))
    return found


def read_entries(*, has_frames: bool) -> list[FlightEntry]:
    """Return all recorded entries, oldest first; takes 15 us per entry."""
    with without_inductor() if has_frames else nullcontext():
        dumps = [(source, dump(True, has_frames, False)) for source, dump in list_dumps()]
    return [
        _build_entry(source, raw)
        for source, data in dumps
        for raw in _load(data).get("entries", ())
        if not raw.get("is_p2p", False)  # `operations` records them, for all backends.
    ]


def _load(data: bytes) -> dict[str, Any]:
    # torch's own bytes, made in this process.
    loaded = pickle.loads(data)
    return loaded if isinstance(loaded, dict) else {}


def _build_entry(source: int, raw: Mapping[str, Any]) -> FlightEntry:
    return FlightEntry(
        record=raw["record_id"],
        key=(source, raw["pg_id"]),
        group=raw["process_group"][0],
        number=raw["collective_seq_id"],
        created_ns=raw["time_created_ns"],
        # gloo's entries never become "completed"; NCCL's are retired by a thread that may be late.
        is_done=bool(raw.get("retired")) or raw.get("state") == "completed",
        raw=raw,
    )


def _name_operation(recorded: str) -> str:
    """Return the name by which users call an operation: `_all_gather_base` is an `all_gather`."""
    if recorded.endswith("barrier"):  # NCCL's is an `all_reduce_barrier`
        return "barrier"
    name = recorded.lower().removeprefix("_")
    for suffix in ("_base", "_coalesced"):
        name = name.removesuffix(suffix)
    return {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}.get(name, name)


def build_call(entry: FlightEntry, groups: Groups, windows: Windows) -> Call:
    """Return an entry's call, with what the wrappers know of it.

    Args:
        entry: the recorded entry.
        groups: those of this rank.
        windows: which thread was in which wrapper, and when.
    """
    window = _find_window(entry, windows)
    return Call(
        group=groups.name_sequence(entry),
        number=entry.number,
        operation=entry.operation if window is None else window.operation,
        sizes=tuple(tuple(size) for size in entry.raw.get("input_sizes", ())),
        dtypes=tuple(_DTYPES.get(name, name.lower()) for name in entry.raw.get("input_dtypes", ())),
        reduce_op=None if window is None else name_reduce_op(window.op),
        peer=None if window is None else groups.find_rank(entry.group, window.root),
        done=entry.is_done,
        began_s=entry.created_ns / 1e9,
        frames=_build_frames(entry.raw.get("frames", ())),
        module="" if window is None else window.module,
        splits=() if window is None else window.splits,
    )


def _find_window(entry: FlightEntry, windows: Windows) -> CallWindow | None:
    window = windows.find(entry.thread, entry.group, entry.created_ns)
    # Gloo implements a reduce-scatter by all-reduces.
    if window is None or (entry.operation in _ROOTED and entry.operation != window.operation):
        return None
    return window


def _build_frames(raw: Any) -> tuple[Frame, ...]:
    return tuple(
        _build_frame(frame["filename"], frame["line"], frame["name"])
        for frame in raw
        if not is_watching(frame["filename"])
    )


@functools.lru_cache(maxsize=4096)
def _build_frame(path: str, line: int | str, function: str) -> Frame:
    # A thousand calls share a few dozen frames.
    return build_frame(path, int(line), function)


# ---- process groups


@dataclass(frozen=True)
class Groups:
    """The process groups that this rank is in.

    Attributes:
        by_name: all of them.
        backends: by name, such as `gloo` or `cpu:gloo,cuda:nccl`.
    """

    by_name: Mapping[str, Group]
    backends: Mapping[str, str]

    def join(self, others: Groups) -> Groups:
        """Return these groups and `others`; if both have a name, it means the group of `others`."""
        return Groups({**self.by_name, **others.by_name}, {**self.backends, **others.backends})

    def name_sequence(self, entry: FlightEntry) -> str:
        """Return the name of the sequence of calls that an entry belongs to.

        A group with two backends has one sequence per backend. The sequence of the first backend has the
        group's name, that of another is `NAME:BACKEND`. So all members use the same names.
        """
        backends = [word.rpartition(":")[2] for word in self.backends.get(entry.group, "").split(",")]
        if len(backends) < 2 or entry.backend in ("", backends[0]):
            return entry.group
        return f"{entry.group}:{entry.backend}"

    def find_rank(self, name: str, place: int | None) -> int | None:
        """Return the global rank of a rank in a group."""
        group = self.by_name.get(name)
        if group is None or place is None or not 0 <= place < len(group.ranks):
            return place
        return group.ranks[place]


def read_groups() -> Groups:
    """Return the process groups that exist now."""
    world = find_world()
    groups: dict[str, Group] = {}
    backends: dict[str, str] = {}
    if world is None:
        return Groups(groups, backends)
    members = dict(world.pg_group_ranks)
    default = getattr(world, "default_pg", None)
    for group, name in list(world.pg_names.items()):
        order = members.get(group)
        if not isinstance(order, dict):
            continue
        ranks = tuple(sorted(order, key=order.__getitem__))
        groups[name] = Group(name, _label(group, ranks, is_default=group is default), ranks)
        with suppress(KeyError):
            backends[name] = str(world.pg_map[group][0])
    return Groups(groups, backends)


def count_named() -> int:
    """Return the number of groups that torch has named by counting here, those without this rank included."""
    number = getattr(find_world(), "group_count", 0)
    return number if isinstance(number, int) else 0


def _label(group: Any, ranks: tuple[int, ...], *, is_default: bool) -> str:
    """Return a group's name for people; a mesh describes its groups as `mesh_AXIS`."""
    description = str(getattr(group, "group_desc", ""))
    if is_default or description in ("default_pg", "mesh_default"):
        return "world"
    if description in ("", "undefined"):
        return f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return description.removeprefix("mesh_")
