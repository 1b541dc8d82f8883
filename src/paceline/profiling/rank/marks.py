"""Marks forward, backward and garbage collection in a trace while it is recorded.

torch's profiler shows optimizer steps and the loaders' waiting by itself, but not where a forward or backward
begins and ends.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

from paceline.profiling.rank.sampler import LEAST_GENERATION
from paceline.torch_seams.profiling import allow_global_hooks
from paceline.torch_seams.watching import hide_from_compiler

METADATA = "paceline"
"""The key of a trace's own table for what the recorder knows beside the events."""
MARK = "paceline: "
"""The beginning of the names of marks; the rest is a phase."""
WAITING = "waiting"
"""The key of the loop's waiting in the table of a light recording, beside the names of phases."""
SEARCHING = "searching"
"""The key of DDP's preparations for a backward, likewise."""


class PhaseMarks:
    """The hooks that mark phases; they act on the thread that installs them.

    Args:
        torch: the module.
        on_forward: called before each forward of an outermost module.
    """

    def __init__(self, torch: Any, on_forward: Callable[[], None]) -> None:
        self._torch = torch
        self._on_forward = on_forward
        self._thread = threading.get_ident()
        self._depth = 0
        self._open: list[Any] = []
        self._collection: Any = None
        modules = torch.nn.modules.module
        self._disallow_hooks = allow_global_hooks()
        hide_from_compiler(torch, PhaseMarks._enter, PhaseMarks._leave)
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        self._originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, original in self._originals.items():
            setattr(torch.autograd, name, self._wrap(original))
        gc.callbacks.append(self._collect)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._disallow_hooks()
        for name, original in self._originals.items():
            if getattr(getattr(self._torch.autograd, name), "__wrapped__", None) is original:
                setattr(self._torch.autograd, name, original)
        gc.callbacks.remove(self._collect)
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _mark(self, phase: str) -> Any:
        mark = self._torch.profiler.record_function(MARK + phase)
        mark.__enter__()
        return mark

    def _enter(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._depth:
            self._on_forward()
            if not self._handles:
                return
            self._open.append(self._mark("forward"))
        self._depth += 1

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or not self._depth:
            return
        self._depth -= 1
        if not self._depth and self._open:
            self._open.pop().__exit__(None, None, None)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self._torch.profiler.record_function(MARK + "backward"):
                return original(*args, **kwargs)

        return marked

    def _collect(self, moment: str, info: dict[str, int]) -> None:
        if moment == "start" and info["generation"] >= LEAST_GENERATION:
            self._collection = self._mark("garbage collection")
        elif self._collection is not None:
            mark, self._collection = self._collection, None
            mark.__exit__(None, None, None)
