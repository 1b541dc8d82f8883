"""Detects the first gradient that is not finite, before the ranks' gradients are summed.

After the reduction every rank has the same NaN, and its origin is lost. Checking all gradients takes too
long. But a non-finite value spreads in backward to everything that is computed later, so a few small
parameters of each optimizer suffice. A hook on these (`Tensor.register_hook`) checks the rank's own gradient
before it is accumulated, for about 10 us each (3 us with warm caches). If one is not finite, the whole model
is checked once: at the end of this backward pass, and before DDP puts the sums in place.

A finding counts only once it has reached the weights. A GradScaler or script that skips a step needs no
message, unless it keeps skipping steps or an exception follows. On a GPU nothing waits for the device: sums
are copied into pinned memory and read later, so the module is known only if the weights still show it.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.torch_seams.observing import find_gathering, observe
from paceline.torch_seams.profiling import is_profiling
from paceline.torch_seams.saved import find_gathered, is_part, read_local
from paceline.torch_seams.watching import (
    call_after_backward,
    count_writes,
    find_backward_number,
    hide_from_compiler,
)
from paceline.watch.protocol.report import Effect, NotFinite
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.parameter_modules import Named, find_siblings, has_finite_gradient, is_finite
from paceline.watch.rank.threads import mark_main_thread, resolve

# Summing more numbers than this uses several threads (torch's grain size) and takes some microseconds more.
_MAX_NUMBERS = 32768
_PER_GROUP = 4
_IN_ALL = 8
# This many backward passes in a row without an effect on the weights are reported too. A GradScaler begins
# with a scale of 2**16 and halves it each time, so after this many the scale is no longer the reason.
_MANY = 20
_MAX_FRAMES = 4
# Gathers of sharded parameters that are followed at most, until all that are watched have had theirs.
_MANY_GATHERS = 4096
# Backward passes on a GPU whose sums are kept: more than there are between two beats.
_LATE = 1024


class Gradients:
    """The findings in the gradients of this process's optimizers.

    Attributes:
        found: the first that was not finite, once it is certain; nothing is checked from then on.
        passes: number of backward passes through the watched parameters.
        observer: is called with each gradient of a watched parameter before it is accumulated; must not
            raise.
        at_pass: the number of a pass, and what is called when it begins.
    """

    def __init__(self) -> None:
        self.found: NotFinite | None = None
        self.passes = 0
        self.observer: Callable[[WatchedParameter, Any], None] | None = None
        self.at_pass: tuple[int, Callable[[], None]] = (0, lambda: None)
        self._torch: Any = None
        self._original: Any = None
        self._wrapper: Any = None
        self._is_over = False
        self._watched: list[WatchedParameter] = []
        self._task = -1
        self._checked_task = -1
        self._fired: WatchedParameter | None = None
        # The finding that has not reached the weights yet, its parameter, and the weights' version at that
        # time.
        self._pending: tuple[NotFinite, WatchedParameter, int] | None = None
        self._row = (0, 0)
        self._after_step: Any = None
        self._num_gathers = 0
        self._end_gathers: Any = None

    def install(self, torch: Any) -> None:
        """Make each optimizer that is created from now on choose its parameters; call it once."""
        hide_from_compiler(torch, WatchedParameter.__call__, Gradients._check, Gradients._note_step)
        kind = torch.optim.Optimizer
        original = self._original = kind.add_param_group
        self._torch = torch

        @functools.wraps(original)
        def add_param_group(optimizer: Any, param_group: Any) -> Any:
            original(optimizer, param_group)
            with suppress(Exception):
                if not self._is_over:
                    self._watch(optimizer)

        self._wrapper = kind.add_param_group = add_param_group

    def remove(self) -> None:
        """Remove the hooks, and restore torch's method."""
        self._is_over = True
        if self._wrapper is not None and self._wrapper is self._torch.optim.Optimizer.add_param_group:
            self._torch.optim.Optimizer.add_param_group = self._original
        if self._after_step is not None:
            self._after_step.remove()
            self._after_step = None
        self._stop_following()
        for watched in self._watched:
            watched.remove()
        self._watched.clear()

    def list_watched(self) -> list[WatchedParameter]:
        """Return the parameters with a hook that still exist."""
        return [watched for watched in self._watched if watched.find() is not None]

    def settle(self) -> None:
        """Check whether a finding has reached the weights; may be called from any thread at any time."""
        if self.found is not None:
            return
        for watched in self._watched:
            watched.read_late()
        pending = self._pending  # Read once, because this may be another thread.
        if pending is None:
            return
        finding, watched, version = pending
        parameter = watched.find()
        if parameter is None:
            self._pending = None
        elif not is_finite(parameter):
            self.found = finding
        elif count_writes(read_local(parameter)) != version:  # The step has passed without it.
            self._pending = None

    def note_error(self) -> bool:
        """Note that an exception ends the script, and return whether there is something new to report."""
        was_found = self.found is not None
        self.settle()
        pending = self._pending
        if self.found is None and pending is not None and pending[0].number == self.passes:
            self.found = replace(pending[0], effect="raised")
        return self.found is not None and not was_found

    def _watch(self, optimizer: Any) -> None:
        """Choose parameters of the optimizer's newest group to watch."""
        for gone in [watched for watched in self._watched if watched.find() is None]:
            gone.remove()
            self._watched.remove(gone)
        known = {id(watched.find()): watched for watched in self._watched}
        small = []
        for n, parameter in enumerate(optimizer.param_groups[-1]["params"]):
            if id(parameter) in known:  # The older optimizer may be about to be deleted.
                known[id(parameter)].belong_to(optimizer, n)
            elif self._can_be_watched(parameter):
                small.append(n)
        # The first in the model sees most; the others are for models with several towers.
        count = min(_PER_GROUP, _IN_ALL - len(self._watched), len(small))
        for n in range(count):
            self._watched.append(
                WatchedParameter(self, self._torch, optimizer, small[n * len(small) // count])
            )
        place = find_gathering()
        if place is not None and self._end_gathers is None and any(map(_awaits_gather, self._watched)):
            self._end_gathers = observe(self._torch, place, after=self._note_gather)

    def _can_be_watched(self, parameter: Any) -> bool:
        return (
            (type(parameter) in (self._torch.nn.Parameter, self._torch.Tensor) or is_part(parameter))
            and parameter.requires_grad
            and parameter.is_leaf
            and parameter.is_floating_point()
            and 0 < parameter.numel() <= _MAX_NUMBERS
            and read_local(parameter).numel() > 0
        )

    def _note_gather(self, result: Any, record: Any) -> None:
        """Take the whole parameter that torch has gathered by a record of `fully_shard`."""
        with suppress(Exception):
            waiting = list(filter(_awaits_gather, self._watched))
            self._num_gathers += 1
            if not waiting or self.passes > 1 or self._num_gathers > _MANY_GATHERS:
                self._stop_following()
                return
            gathered = find_gathered(record)
            for watched in waiting:
                if gathered is not None and watched.find() is record.sharded_param:
                    watched.hook_whole(gathered[1])

    def _stop_following(self) -> None:
        if self._end_gathers is not None:
            self._end_gathers()
            self._end_gathers = None

    # ---- within backward

    def count(self, task: int) -> None:
        """Count the backward pass with this number of autograd's, at the first gradient that is seen."""
        if task != self._task:
            self._task = task
            self.passes += 1
            if self.passes == self.at_pass[0]:
                self.at_pass[1]()

    def check_after(self, task: int, watched: WatchedParameter) -> None:
        """Schedule a check of the model at the end of this backward pass."""
        if task != self._checked_task:
            self._checked_task, self._fired = task, watched
            call_after_backward(self._torch, self._check)

    def _check(self) -> None:
        try:
            assert self._fired is not None
            self._check_from(self._fired)
            if self.found is not None:
                self.remove()
        except Exception:  # the script's backward goes on, without us
            self.remove()

    def _check_from(self, watched: WatchedParameter) -> None:
        self.settle()
        parameter = watched.find()
        if self.found is not None or parameter is None:
            return
        if watched.siblings is None:
            watched.siblings = find_siblings(self._torch, parameter)
        named = [one for one in watched.siblings if one.find() is not None]
        spoilt = [one for one in named if not is_finite(one.find())]
        is_spoilt = bool(spoilt) or not is_finite(parameter)
        if late := [other.late for other in self._watched if other.late]:
            for other in self._watched:
                other.late = 0
            if is_spoilt:
                # If all of them are not finite, the origin can no longer be found.
                began = spoilt[-1] if 0 < len(spoilt) < len(named) else None
                self.found = _describe(min(late), began, named, "applied")
            return
        if not is_spoilt:
            self._note(watched, parameter, named)
        elif self._pending is not None:
            self.found = self._pending[0]
        else:
            self.found = _describe(self.passes, spoilt[-1] if spoilt else None, named, "inherited")

    def _note(self, watched: WatchedParameter, parameter: Any, named: Sequence[Named]) -> None:
        last, length = self._row
        self._row = self.passes, length + 1 if last == self.passes - 1 else 1
        if self._pending is None:
            broken = [one for one in named if not has_finite_gradient(one.find())]
            finding = _describe(self.passes, broken[-1] if broken else None, named, "applied")
            self._pending = finding, watched, count_writes(read_local(parameter))
            if self._after_step is None:
                # Only now, because optimizers without hooks are faster.
                module = sys.modules[self._torch.optim.Optimizer.__module__]
                self._after_step = module.register_optimizer_step_post_hook(self._note_step)
        elif self._row[1] >= _MANY:
            self.found = replace(self._pending[0], effect="skipped")

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check the finding after an optimizer's step, because a script may end then and free the model."""
        if not self._torch.compiler.is_compiling():
            with suppress(Exception):
                self.settle()


class WatchedParameter:
    """A parameter with a hook on its gradient.

    Attributes:
        late: the backward pass whose gradient was not finite, if that was read later; else 0.
        is_part: whether it is a DTensor, of which this rank has a part.
        siblings: the parameters of its model, once they were searched for.
    """

    # Models are pickled without their hooks; that needs no warning.
    __torch_unserializable__ = True
    # Layouts that refuse hooks on gradients take this one (`parallel/parameter_hooks.py`).
    only_looks = True

    def __init__(self, gradients: Gradients, torch: Any, optimizer: Any, number: int) -> None:
        self.late = 0
        self.siblings: tuple[Named, ...] | None = None
        self.belong_to(optimizer, number)
        self._gradients = gradients
        self._torch = torch
        self._is_compiling = torch.compiler.is_compiling
        self._find_task = find_backward_number(torch)
        self._sums: Any = None
        parameter = optimizer.param_groups[-1]["params"][number]
        self.is_part = is_part(parameter)
        self._handles = [parameter.register_hook(self)]

    @property
    def has_whole(self) -> bool:
        """Whether there is a hook on the whole parameter, too."""
        return len(self._handles) > 1

    def hook_whole(self, whole: Any) -> None:
        """Look at the gradient of the parameter that `fully_shard` gathers; its part gets only the sums."""
        self._handles.append(whole.register_hook(self))

    def belong_to(self, optimizer: Any, number: int) -> None:
        """Assign the hook to the parameter with this number in the optimizer's newest group."""
        # No reference to the parameter itself: one with a weak reference cannot be swapped
        # (`torch.utils.swap_tensors`).
        self._optimizer = weakref.ref(optimizer)
        self._place = len(optimizer.param_groups) - 1, number

    @property
    def optimizer(self) -> Any | None:
        """The optimizer that updates it; None once that was deleted."""
        return self._optimizer()

    def find(self) -> Any | None:
        """Return the parameter, or None if the optimizer has been deleted."""
        optimizer = self._optimizer()
        group, number = self._place
        with suppress(IndexError):
            return None if optimizer is None else optimizer.param_groups[group]["params"][number]
        return None

    def __call__(self, gradient: Any) -> None:
        if self._is_compiling():  # In compiled autograd a check would break its graph.
            return
        try:
            task = self._find_task()
            self._gradients.count(task)
            if is_profiling(self._torch):  # its rows are to show the script's operators alone
                return
            if self._gradients.observer is not None:
                self._gradients.observer(self, gradient)
            if gradient.requires_grad:  # of create_graph=True
                gradient = gradient.detach()
            gradient = read_local(gradient)
            if not _is_here(gradient):
                self._note_late(gradient, task)
            elif not math.isfinite(gradient.sum().item()) and not is_finite(gradient):
                self._gradients.check_after(task, self)
        except Exception:  # a gradient of another kind
            self.remove()

    def _note_late(self, gradient: Any, task: int) -> None:
        if self._torch.cuda.is_current_stream_capturing():
            return
        if self.late:
            self._gradients.check_after(task, self)
        if self._sums is None:
            self._sums = _make_sums(self._torch)
        total = gradient.sum(dtype=self._torch.float32)
        self._sums[self._gradients.passes % _LATE].copy_(total, non_blocking=True)

    def read_late(self) -> None:
        """Read the sums that have arrived from the device."""
        if self._sums is None or self.late or is_finite(self._sums):
            return
        passes = self._gradients.passes
        bad = [n for n, value in enumerate(self._sums.tolist()) if not math.isfinite(value)]
        self.late = min(passes - (passes - n) % _LATE for n in bad)
        self._sums.nan_to_num_(0.0, 0.0, 0.0)

    def remove(self) -> None:
        """Remove the hooks; allowed from within one, too."""
        for handle in self._handles:
            handle.remove()


def _awaits_gather(watched: WatchedParameter) -> bool:
    return watched.is_part and not watched.has_whole


def _is_here(gradient: Any) -> bool:
    return bool(gradient.is_cpu)


def _make_sums(torch: Any) -> Any:
    """Return pinned memory into which a device writes sums directly."""
    return torch.zeros(_LATE, dtype=torch.float32, pin_memory=True)


def _describe(number: int, began: Named | None, named: Sequence[Named], effect: Effect) -> NotFinite:
    frames = own_frames(resolve(mark_main_thread()))[:_MAX_FRAMES]
    return NotFinite(
        number=number,
        time_s=time.time(),
        effect=effect,
        parameter=began.name if began is not None else "",
        kind=began.kind if began is not None else "",
        is_at_end=began is not None and began is named[-1],
        frames=frames,
    )
