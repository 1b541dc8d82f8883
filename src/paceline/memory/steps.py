"""StepMemory notes the resident memory at the end of each optimizer step: two system calls per step.

Others may follow the steps: recordings and timers.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from paceline.memory.account import Steps
from paceline.memory.limits import read_anonymous, read_resident
from paceline.torch_seams.watching import hide_from_compiler

# The kernel counts the peak in kilobytes.
_UNIT = 1024
_MANY_FRAMES = 16


class StepMemory:
    """The memory of this process's steps.

    Attributes:
        base: bytes that the process held before its script ran.
        count: steps so far.
    """

    def __init__(self) -> None:
        self.base = 0
        self.count = 0
        self._peak = self._first = self._last = 0
        # Replaced as a whole, because threads add to it.
        self._followers: tuple[Callable[[int], None], ...] = ()
        self._optimizer: weakref.ref[Any] | None = None
        self._handle: Any = None
        self._torch: Any = None

    def install(self, torch: Any) -> None:
        """Note steps from now on; further calls do nothing."""
        if self._handle is not None:
            return
        self.base = read_anonymous() or 0
        self._torch = torch
        hide_from_compiler(torch, StepMemory._note)
        module = sys.modules[torch.optim.Optimizer.__module__]
        self._handle = module.register_optimizer_step_post_hook(self._note)

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def follow(self, follower: Callable[[int], None]) -> None:
        """Call a function with the count after each step, in the thread of the step."""
        self._followers = (*self._followers, follower)

    def leave(self, follower: Callable[[int], None]) -> None:
        """Call a function no more."""
        self._followers = tuple(each for each in self._followers if each != follower)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._torch.compiler.is_compiling() or _is_nested():
            return
        # Of several optimizers, the first one ends a step.
        known = None if self._optimizer is None else self._optimizer()
        if known is None:
            with suppress(TypeError):
                self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return
        self.count += 1
        self._last = read_resident()
        if self.count == 2:
            self._first = self._last
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
        for follower in self._followers:
            follower(self.count)

    def summarize(self) -> Steps:
        """Return the steps so far."""
        return Steps(self.count, self._peak, self._first or self._last, self._last)


def _is_nested() -> bool:
    """Return whether a step was called by a step, as those of subclasses are: it ends with the outer one."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    for _ in range(_MANY_FRAMES):
        if frame is None:
            break
        # The function that torch puts around the steps of all optimizers; it calls the hooks.
        code = frame.f_code
        count += code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py")
        frame = frame.f_back
    return count > 1


STEPS = StepMemory()
"""The record of this process; a fork inherits its counts, as it inherits the memory."""
