"""Starts torch's profiler so that it stops quickly, and notes what the profiler leaves out.

Nothing of torch is imported before it is used: a script may start before it imports torch.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.torch_seams.watching import find_world

_C10D = "torch._C._distributed_c10d"
_FUNCTIONAL = "torch.distributed._functional_collectives"


def build_profiler(torch: Any, *, has_shapes: bool = False) -> Any:
    """Return a profiler of operators and kernels that only writes a trace.

    Without `trace_only`, stopping builds Python objects for all events, which takes seconds. Recording shapes
    of all operators would double the cost: 1.41 instead of 1.18 times the processor's time of a small
    transformer's step.
    """
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    settings: dict[str, Any] = {"record_shapes": has_shapes}
    with suppress(AttributeError, TypeError, ImportError):
        settings["experimental_config"] = torch._C._profiler._ExperimentalConfig(trace_only=True)
    return torch.profiler.profile(activities=activities, **settings)


def start_profiler(profiler: Any) -> None:
    """Start a profiler, without torch's warning."""
    with warnings.catch_warnings():
        # Up to torch 2.11 each profiler warns of what happens between cycles; this one has a single cycle. A
        # script that turns warnings into errors would get no recording.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.start()


def start_light(torch: Any, profiler: Any) -> bool:
    """Start a profiler that records annotations and collectives of gloo only; return whether this torch can.

    `torch.profiler` gives no way to choose scopes, but the function that it calls takes them. If this torch
    has another function there, nothing is started.
    """
    module: Any = sys.modules.get("torch.autograd.profiler")
    enable = getattr(module, "_enable_profiler", None)
    scopes: Any = getattr(getattr(torch._C, "_profiler", None), "RecordScope", None)
    if enable is None or not hasattr(scopes, "USER_SCOPE"):
        return False

    def enable_scope(config: Any, activities: Any) -> None:
        enable(config, activities, {scopes.USER_SCOPE})

    module._enable_profiler = enable_scope
    try:
        start_profiler(profiler)
    except TypeError:  # another signature
        with suppress(Exception):
            profiler.stop()
        return False
    finally:
        module._enable_profiler = enable
    return True


def allow_global_hooks() -> Callable[[], None]:
    """Suppress torch's warning on compiled modules under hooks that see all modules; return what ends this.

    The warning advises against the hooks, which are not the script's, and would end one that turns warnings
    into errors.
    """
    warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
    added = warnings.filters[0]

    def remove() -> None:
        with suppress(ValueError):  # the script has changed its filters
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return remove


def note_waits(note: Callable[[int, int], None]) -> Callable[[], None]:
    """Call `note` with begin and end of each wait for a collective; return the function that ends this.

    Times are nanoseconds since 1970. Waits inside of C++, such as those of DDP, are not among them.
    """
    owners = [
        (getattr(sys.modules.get(_C10D), "Work", None), "wait"),
        (sys.modules.get(_FUNCTIONAL), "wait_tensor"),
    ]
    undo: list[Callable[[], None]] = []
    for owner, name in owners:
        original = vars(owner).get(name) if owner is not None else None
        if original is not None:
            wrapped = _wrap_wait(original, note)
            setattr(owner, name, wrapped)
            undo.append(functools.partial(_put_back, owner, name, wrapped, original))

    def remove() -> None:
        for step in undo:
            step()

    return remove


def _put_back(owner: Any, name: str, wrapped: Any, original: Any) -> None:
    if vars(owner).get(name) is wrapped:
        setattr(owner, name, original)


def _wrap_wait(original: Any, note: Callable[[int, int], None]) -> Any:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        began = time.time_ns()
        try:
            return original(*args, **kwargs)
        finally:
            note(began, time.time_ns())

    return wait


def describe_reducer(torch: Any, module: Any) -> dict[str, Any] | None:
    """Return how a DDP module reduces, as `trace.Reducer` has it; `None` for another module."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return None
    facts = module._get_ddp_logging_data()
    return {
        "finds_unused": bool(module.find_unused_parameters) and not module.static_graph,
        "unused_bytes": int(facts.get("unused_parameter_size", 0)),
        "is_constant": bool(module.reducer._ddp_graph_static()),
    }


def is_profiling(torch: Any) -> bool | None:
    """Return whether torch's profiler runs in this thread; `None` if that cannot be known."""
    with suppress(AttributeError):
        return bool(torch.autograd._profiler_enabled())
    return None


def load_annotations(torch: Any) -> None:
    """Have torch import what its annotations need.

    A profiler with stacks that records this import names it by memory that has been freed (torch 2.13), and
    `events()` then fails if other code, such as the watch's, has used that memory.
    """
    with suppress(Exception), torch.autograd.profiler.record_function("paceline"):
        pass


def list_members() -> dict[str, list[int]]:
    """Return the global ranks of this process's groups, by the groups' names; empty if torch lacks them."""
    found: dict[str, list[int]] = {}
    with suppress(Exception):  # whatever torch has changed, the recording goes on
        world = find_world()
        assert world is not None
        for group, numbers in list(world.pg_group_ranks.items()):
            found[world.pg_names[group]] = sorted(numbers)
    return found
