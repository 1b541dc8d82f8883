"""Reads the entries of torch's Flight Recorder, without importing torch: the script may not have done so."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from paceline.torch_seams.watching import list_dumps, without_inductor

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
        return name_operation(str(self.raw["profiling_name"]).rpartition(":")[2])

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
    with _beside_captures(), without_inductor() if has_frames else nullcontext():
        dumps = [(source, dump(True, has_frames, False)) for source, dump in list_dumps()]
    return [
        _build_entry(source, raw)
        for source, data in dumps
        for raw in _load(data).get("entries", ())
        if not raw.get("is_p2p", False)  # `operations` records them, for all backends.
    ]


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread ask for events of CUDA while another one records a graph, as torch's own watchdog does.

    Otherwise the recording would fail, as the recorder asks whether each collective has ended.
    """
    torch, runtime = sys.modules.get("torch"), None
    mode = ctypes.byref(ctypes.c_int(1))  # cudaStreamCaptureModeThreadLocal; then the mode that it replaces
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        with suppress(OSError):  # a build that has the library elsewhere
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    if runtime is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(mode)
    try:
        yield
    finally:
        if runtime is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(mode)


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


def name_operation(recorded: str) -> str:
    """Return the name by which users call an operation: `_all_gather_base` is an `all_gather`."""
    if recorded.endswith("barrier"):  # NCCL's is an `all_reduce_barrier`
        return "barrier"
    name = recorded.lower().removeprefix("_")
    for suffix in ("_base", "_coalesced"):
        name = name.removesuffix(suffix)
    return {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}.get(name, name)
