"""Starts torch's profiler such that stopping it is quick, and reads the Flight Recorder's entries.

Nothing of torch is imported before it is used: a script may start before it imports torch.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.torch_seams.watching import find_group_class, find_world, list_dumps


def build_profiler(torch: Any) -> Any:
    """Return a profiler of operators and kernels that only writes a trace.

    Without `trace_only`, stopping builds Python objects for all events, which takes seconds. Recording shapes
    would double the cost: 1.41 instead of 1.18 times the processor's time of a small transformer's step.
    """
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    settings: dict[str, Any] = {}
    with suppress(AttributeError, TypeError, ImportError):
        settings["experimental_config"] = torch._C._profiler._ExperimentalConfig(trace_only=True)
    return torch.profiler.profile(activities=activities, **settings)


def is_profiling(torch: Any) -> bool | None:
    """Return whether torch's profiler runs in this thread; `None` if that cannot be known."""
    with suppress(AttributeError):
        return bool(torch.autograd._profiler_enabled())
    return None


def note_transfers(note: Callable[[str, str, int, int], None]) -> Callable[[], None]:
    """Call `note` before each send and receive of this process; return the function that ends this.

    Args:
        note: takes `send` or `recv`, the group's name, the global rank of the peer and the bytes.
    """
    groups = find_group_class()
    if groups is None:
        return lambda: None
    wrapped = {name: _wrap_transfer(name, getattr(groups, name), note) for name in ("send", "recv")}
    # As they stand in the class: what `getattr` returns would not bind again.
    originals = {name: vars(groups)[name] for name in wrapped if name in vars(groups)}
    for name in originals:
        setattr(groups, name, wrapped[name])

    def remove() -> None:
        for name, original in originals.items():
            if vars(groups)[name] is wrapped[name]:
                setattr(groups, name, original)

    return remove


def _wrap_transfer(name: str, original: Any, note: Callable[[str, str, int, int], None]) -> Any:
    @functools.wraps(original)
    def transfer(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # whatever torch has changed, the script goes on
            world = find_world()
            assert world is not None
            members = {number: rank for rank, number in world.pg_group_ranks[group].items()}
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            note(name, world.pg_names[group], members[peer], num_bytes)
        return original(group, tensors, peer, *args, **kwargs)

    return transfer


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
