"""Converts the entries that torch's Flight Recorder dumps into `Call`s."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.torch_seams.flight import FlightEntry
from paceline.torch_seams.watching import find_world
from paceline.watch.protocol.frames import build_frame, is_watching
from paceline.watch.protocol.report import Call, Frame, Group
from paceline.watch.rank.operations import CallWindow, Windows, name_reduce_op

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


def build_call(entry: FlightEntry, groups: Groups, windows: Windows) -> Call:
    """Return an entry's call, with what the wrappers know of it.

    Args:
        windows: which thread was in which wrapper, and when.
    """
    window = _find_window(entry, windows)
    operation, splits = (entry.operation, ()) if window is None else (window.operation, window.splits)
    if operation == "all_to_all" and not splits:  # a list with a tensor for each rank, or a functional one
        both = [entry.raw.get(name, ()) for name in ("input_sizes", "output_sizes")]
        splits = tuple(tuple(map(math.prod, sizes)) for sizes in both if sizes)
    return Call(
        group=groups.name_sequence(entry),
        number=entry.number,
        operation=operation,
        sizes=tuple(tuple(size) for size in entry.raw.get("input_sizes", ())),
        dtypes=tuple(_DTYPES.get(name, name.lower()) for name in entry.raw.get("input_dtypes", ())),
        reduce_op=None if window is None else name_reduce_op(window.op),
        peer=None if window is None else groups.find_rank(entry.group, window.root),
        done=entry.is_done,
        began_s=entry.created_ns / 1e9,
        frames=_build_frames(entry.raw.get("frames", ())),
        module="" if window is None else window.module,
        splits=splits,
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
