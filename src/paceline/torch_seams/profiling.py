"""Starts torch's profiler such that stopping it is quick, and reads the Flight Recorder's entries.

Nothing of torch is imported before it is used: a script may start before it imports torch.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from paceline.torch_seams.watching import list_dumps


def build_profiler(torch: Any) -> Any:
    """Return a profiler of operators and kernels, with shapes, that only writes a trace.

    Without `trace_only`, stopping builds Python objects for all events, which takes seconds.
    """
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    settings: dict[str, Any] = {}
    with suppress(AttributeError, TypeError, ImportError):
        settings["experimental_config"] = torch._C._profiler._ExperimentalConfig(trace_only=True)
    return torch.profiler.profile(activities=activities, record_shapes=True, **settings)


def read_collectives(since_ns: int) -> list[tuple[int, str, int, str, list[Any], list[str]]]:
    """Return the collectives issued since an instant: instant, group, number, operation, sizes and dtypes.

    They are in order of issue. Sends and receives of gloo are not recorded.
    """
    found = []
    for _, dump in list_dumps():
        loaded = pickle.loads(dump(True, False, False))  # torch's own bytes, made in this process
        for entry in loaded.get("entries", ()) if isinstance(loaded, dict) else ():
            if entry["time_created_ns"] >= since_ns and not entry.get("is_p2p"):
                found.append(
                    (
                        int(entry["time_created_ns"]),
                        str(entry["process_group"][0]),
                        int(entry["collective_seq_id"]),
                        str(entry["profiling_name"]).rpartition(":")[2],
                        list(entry.get("input_sizes", ())),
                        [str(name) for name in entry.get("input_dtypes", ())],
                    )
                )
    return found
