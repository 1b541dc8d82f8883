"""Notes when the training loop is in forward, in backward, or waiting for a collective.

Times are noted by hooks without torch's profiler, whose annotations would cost more. Hooks on every module
would cost several microseconds each, so those that see all modules stay for one step only, which is not
recorded: it finds the outermost modules, and only these keep hooks.

The hooks on modules are functions without state: a script that copies or pickles its model while it is
recorded copies them too, and they then do nothing.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.torch_seams.profiling import allow_global_hooks, describe_reducer, note_waits
from paceline.torch_seams.watching import call_after_backward, hide_from_compiler

METADATA = "paceline"
"""The key of a trace's own table for what the recorder knows beside the events."""
WAITING = "waiting"
"""The key of the loop's waiting in the table of a recording, beside the names of phases."""
Span = tuple[int, int]

_current: LoopTimes | None = None


def _enter_outermost(module: Any, args: Any) -> None:
    if _current is not None:
        _current.enter()


def _leave_outermost(module: Any, args: Any, output: Any) -> None:
    if _current is not None:
        _current.leave()


class LoopTimes:
    """The times of the training loop's phases; of the thread that creates it.

    Args:
        on_forward: called before each forward of an outermost module.
        on_change: called where a backward begins, and where it has computed everything.

    Attributes:
        forwards, backwards: begin and end of each.
        waits: of the loop in Python for a collective, and the end of a backward, in which DDP waits.
        names: of the modules in the outermost ones, by id.
    """

    def __init__(self, torch: Any, on_forward: Callable[[], None], on_change: Callable[[], None]) -> None:
        global _current
        self._torch = torch
        self._on_forward = on_forward
        self._on_change = on_change
        self._thread = threading.get_ident()
        self._depth = 0
        self._is_backward = False
        self._began_ns = self._computed_ns = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.names: dict[int, str] = {}
        self.forwards: list[Span] = []
        self.backwards: list[Span] = []
        self.waits: list[Span] = []
        modules = torch.nn.modules.module
        self._disallow_hooks = allow_global_hooks()
        hide_from_compiler(torch, _enter_outermost, _leave_outermost, LoopTimes._search, LoopTimes._found)
        self._handles = [
            modules.register_module_forward_pre_hook(self._search),
            modules.register_module_forward_hook(self._found, always_call=True),
        ]
        self._originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, original in self._originals.items():
            setattr(torch.autograd, name, self._wrap(original))
        self._forget_waits = note_waits(self._note_wait)
        _current = self

    def keep_outermost(self) -> None:
        """End the search: from now on, only the modules found so far have hooks."""
        self._remove_hooks()
        self._depth = 0
        # A script may call the module that DDP wraps by itself, as in an evaluation.
        wrapped = [getattr(module, "module", None) for module in self._seen]
        for module in {*self._seen, *(each for each in wrapped if isinstance(each, self._torch.nn.Module))}:
            with suppress(Exception):  # a model with a named_modules of its own
                for name, part in module.named_modules():
                    self.names.setdefault(id(part), name.removeprefix("module."))
            with suppress(RuntimeError):  # a scripted module takes no hooks
                self._handles += [
                    module.register_forward_pre_hook(_enter_outermost, prepend=True),
                    module.register_forward_hook(_leave_outermost, always_call=True),
                ]

    def list_reducers(self) -> list[dict[str, Any]]:
        """Return the facts of each DDP module among the outermost ones."""
        found = []
        for module in self._seen:
            with suppress(Exception):  # another torch's DDP: nothing is advised on it
                facts = describe_reducer(self._torch, module)
                if facts is not None:
                    found.append(facts)
        return found

    def remove(self) -> None:
        """Remove all hooks."""
        global _current
        if _current is self:
            _current = None
        self._remove_hooks()
        for name, original in self._originals.items():
            if getattr(getattr(self._torch.autograd, name), "__wrapped__", None) is original:
                setattr(self._torch.autograd, name, original)
        self._forget_waits()

    def enter(self) -> None:
        """Begin a forward of an outermost module."""
        if threading.get_ident() != self._thread:
            return
        if not self._depth:
            self._on_forward()
            self._began_ns = time.time_ns()
        self._depth += 1

    def leave(self) -> None:
        """End a forward of an outermost module."""
        if threading.get_ident() != self._thread or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self.forwards.append((self._began_ns, time.time_ns()))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._disallow_hooks()

    def _search(self, module: Any, args: Any) -> None:
        if threading.get_ident() == self._thread:
            if not self._depth and not self._is_backward:  # not what a backward computes again
                self._seen.add(module)
            self._depth += 1

    def _found(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._depth:
            self._depth -= 1

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or _current is not self or self._is_backward:
                return original(*args, **kwargs)
            self._is_backward, self._computed_ns = True, 0
            handle = self._hook_root(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
            began = time.time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                ended, self._is_backward = time.time_ns(), False
                self.backwards.append((began, ended))
                if began < self._computed_ns < ended:
                    self.waits.append((self._computed_ns, ended))
                if handle is not None:
                    handle.remove()

        return timed

    def _hook_root(self, roots: Any) -> Any:
        """Note the instant at which the backward has computed everything, by a hook; return the hook.

        autograd's engine calls functions at the end in the order in which they were added. DDP adds its wait
        with the last gradient, and FSDP with the first module: the first tensor's hook comes before both.
        """
        with suppress(Exception):  # a graph edge, or a root that takes no hooks
            root = roots if isinstance(roots, self._torch.Tensor) else roots[0]
            if root.grad_fn is not None:
                return root.register_hook(self._begin_backward)
        return None

    def _begin_backward(self, gradient: Any) -> None:
        self._on_change()
        with suppress(Exception):
            call_after_backward(self._torch, self._note_computed)

    def _note_computed(self) -> None:
        self._computed_ns = time.time_ns()
        self._on_change()

    def _note_wait(self, began_ns: int, ended_ns: int) -> None:
        if threading.get_ident() == self._thread:
            self.waits.append((began_ns, ended_ns))
