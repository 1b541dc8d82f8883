"""Reads from torch's Flight Recorder which collectives ran, also those that DDP starts in C++."""

from __future__ import annotations

import pickle
from typing import Any

# To pass as `env` to `Pool.run`: the recorder keeps that many entries per process, the newest ones.
RECORD = {"TORCH_FR_BUFFER_SIZE": "2000"}


def count_recorded() -> int:
    """Return how many collectives this process has run, which is the number of the next one."""
    return max((int(entry["record_id"]) + 1 for entry in _entries()), default=0)


def recorded_collectives(since: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and input sizes of this process's collectives, in order, from number `since` on."""
    return [
        (
            entry["profiling_name"].removeprefix("gloo:"),
            tuple(size for sizes in entry["input_sizes"] for size in sizes),
        )
        for entry in _entries()
        if entry["record_id"] >= since
    ]


def _entries() -> list[dict[str, Any]]:
    from torch._C._distributed_c10d import _dump_fr_trace

    entries: list[dict[str, Any]] = pickle.loads(_dump_fr_trace(True, False, False)).get("entries", [])
    return entries
