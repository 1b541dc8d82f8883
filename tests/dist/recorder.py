"""Which collectives ran, told by torch's Flight Recorder: also those that DDP starts in C++."""

from __future__ import annotations

import pickle

# To pass as `env` to `Pool.run`: the recorder keeps that many entries per group.
RECORD = {"TORCH_FR_BUFFER_SIZE": "2000"}


def recorded_collectives(since: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Name and input sizes of every collective of this process, in order, without the first `since`."""
    from torch._C._distributed_c10d import _dump_fr_trace

    entries = pickle.loads(_dump_fr_trace(True, False, False)).get("entries", [])
    return [
        (
            entry["profiling_name"].removeprefix("gloo:"),
            tuple(size for sizes in entry["input_sizes"] for size in sizes),
        )
        for entry in entries
    ][since:]
