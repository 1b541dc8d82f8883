"""Follows the gradients of some small parameters from backward to the optimizer's step.

The hooks are those of `gradients`, which are there anyway. A window lasts from one step of an optimizer to
its next.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.torch_seams.observing import has_other_hooks, is_mean
from paceline.torch_seams.saved import read_local
from paceline.torch_seams.watching import call_after_backward, count_writes
from paceline.watch.rank.first_not_finite import Gradients, WatchedParameter
from paceline.watch.rank.sentinels.numbers import Sample, take_sample
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.threads import Mark, mark_stack

_MANY_WINDOWS = 12
_NUM_WINDOWS = 3


@dataclass(frozen=True)
class BackwardPass:
    """A backward pass.

    Attributes:
        number: its number in this process.
        marks: the stack that called it.
        is_mean: whether it began at one mean, unscaled.
        num_batches: how many batches loaders had given.
        is_exchanged: whether DDP sums its gradients; None without DDP.
    """

    number: int
    marks: tuple[Mark, ...]
    is_mean: bool
    num_batches: int
    is_exchanged: bool | None


@dataclass
class HeldGradient:
    """A watched parameter, and the passes that are in its gradient.

    Attributes:
        passes: those since the gradient was cleared or used.
        dropped: those that were cleared unused, since the step.
        latest: the gradient after the latest pass, if some were dropped.
        was_clear: whether there was no gradient before the latest pass.
        own: the latest pass's gradient, before any exchange.
        stale: the gradient of the step before, if the latest window has added to it.
        written: the parameter's version after the optimizer's step, or when it was read last.
        after_pass: the gradient's memory and version after the latest pass.
        after_step: the same after the step; None once it was cleared or added to.
        left: what was added to.
    """

    watched: WatchedParameter
    passes: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    latest: Sample | None = None
    was_clear: bool = False
    own: Any = None
    stale: Sample | None = None
    written: int = -1
    after_pass: tuple[int, int] | None = None
    after_step: tuple[int, int] | None = None

    @property
    def parameter(self) -> Any:
        """The parameter; None once its optimizer was deleted."""
        return self.watched.find()

    @property
    def gradient(self) -> Any:
        """This rank's part of the gradient that is there; None without one."""
        parameter = self.parameter
        return None if parameter is None or parameter.grad is None else read_local(parameter.grad)

    def identify(self) -> tuple[int, int] | None:
        """Return the gradient's memory and version; None without a gradient."""
        gradient = self.gradient
        if gradient is None or gradient.is_sparse:
            return None
        return gradient.data_ptr(), count_writes(gradient)


class Passes:
    """The backward passes of this process, while they are looked at.

    Args:
        find_exchange: returns whether DDP sums the gradient of a parameter in this pass; None without DDP.
        after: is called with the pass and its parameters when it is over.
    """

    def __init__(
        self,
        torch: Any,
        gradients: Gradients,
        outbox: Outbox,
        find_exchange: Callable[[Any], bool | None],
        after: Callable[[BackwardPass, list[HeldGradient]], None],
    ) -> None:
        self.num_batches = 0
        self._torch = torch
        self._gradients = gradients
        self._outbox = outbox
        self._find_exchange = find_exchange
        self._after = after
        self._held: dict[int, HeldGradient] = {}
        self._passes: dict[int, BackwardPass] = {}
        self._touched: list[HeldGradient] = []
        self._windows: weakref.WeakKeyDictionary[Any, deque[dict[str, Any]]] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Forget all passes, because the next ones are not seen."""
        self._held.clear()
        self._passes.clear()
        self._windows.clear()

    def list_held(self, optimizer: Any) -> list[HeldGradient]:
        """Return the watched parameters of an optimizer that have had a gradient."""
        return [held for held in self._held.values() if held.watched.optimizer is optimizer]

    def find(self, parameter: Any) -> HeldGradient | None:
        """Return what is known of a parameter's gradient."""
        return next((held for held in self._held.values() if held.parameter is parameter), None)

    # ---- within backward

    def note_gradient(self, watched: WatchedParameter, gradient: Any) -> None:
        """Take note of a watched parameter's new gradient, before it is added to the one that is there."""
        parameter = watched.find()
        if parameter is None:
            return
        held = self._held.setdefault(id(watched), HeldGradient(watched))
        number = self._gradients.passes
        if number not in self._passes:
            self._begin(number, parameter)
        before = held.gradient
        held.was_clear = before is None
        if before is None or (held.identify() != held.after_pass and before.is_cpu and not before.any()):
            # Gradients that `fully_shard` has not summed yet are elsewhere.
            held.dropped += [] if watched.has_whole and before is None else held.passes
            held.passes, held.stale, held.after_step, held.was_clear = [], None, None, True
        elif held.after_step is not None:
            # Its values, because `grad.data.zero_()` leaves the version as it was.
            is_left = held.identify() == held.after_step
            held.stale = take_sample(self._torch, [before]) if is_left else None
            held.after_step = None
        if number not in held.passes:
            held.passes.append(number)
        held.own = gradient
        if not self._touched:
            # Twice, to come after DDP's own function, which puts the sums in place.
            call_after_backward(self._torch, lambda: call_after_backward(self._torch, self._end))
        self._touched.append(held)

    def _begin(self, number: int, parameter: Any) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self._passes[number] = BackwardPass(
            number, mark_stack(frame), is_mean(frame), self.num_batches, self._find_exchange(parameter)
        )
        del frame  # in the main thread it is this call's own, whose variables would keep the graph
        for old in [one for one in self._passes if one < number - 256]:
            del self._passes[old]

    def _end(self) -> None:
        touched, self._touched = self._touched, []
        try:
            for held in touched:
                held.after_pass = held.identify()
                if held.dropped:
                    held.latest = take_sample(self._torch, [held.gradient])
            self._after(self._passes[self._gradients.passes], touched)
        except Exception:  # the script's backward goes on
            self.forget()
        for held in touched:
            held.own = None

    # ---- the optimizer's step

    def before_step(self, optimizer: Any, ranks: tuple[int, ...], event: str) -> None:
        """Take note of a window's end.

        Args:
            optimizer: that is about to step.
            ranks: that have this event, too.
        """
        mine = [held for held in self.list_held(optimizer) if held.passes]
        if not mine:
            return
        passes = self._list_passes(n for held in mine for n in held.passes)
        dropped = self._list_passes(set(mine[0].dropped).intersection(*(held.dropped for held in mine)))
        if not passes:
            return
        window = {
            "passes": len(passes),
            "places": len({one.marks for one in passes}),
            "batches": len({one.num_batches for one in passes}),
            "is_mean": all(one.is_mean for one in passes),
            "is_plain": all(held.identify() == held.after_pass for held in mine)
            and not any(has_other_hooks(held.parameter) for held in mine),
            "exchanged": [one.is_exchanged for one in passes],
            "stale": [held.stale for held in mine],
            "dropped": len(dropped),
            "all_places": len({one.marks for one in (*dropped, *passes)}),
            "all_batches": len({one.num_batches for one in (*dropped, *passes)}),
        }
        windows = self._windows.setdefault(optimizer, deque(maxlen=_MANY_WINDOWS))
        windows.append(window)
        num_stale = sum(_is_stale(one["stale"]) for one in windows)
        if num_stale < _NUM_WINDOWS and len(passes) == 1 and not dropped:
            return
        last = [{**one, "stale": None} for one in list(windows)[-_NUM_WINDOWS:]]
        gradients = [held.gradient for held in mine]
        values = {
            "stale": num_stale,
            "of": len(windows),
            "windows": last,
            "latest": [held.latest for held in mine if held.latest is not None],
            "used": [take_sample(self._torch, [held.gradient]) for held in mine if held.latest],
            "sums": take_sample(self._torch, [one for one in gradients if one is not None]),
            "weights": take_sample(self._torch, [read_local(held.parameter) for held in mine]),
        }
        self._outbox.put("window", event, ranks, self._gradients.passes, passes[-1].marks, values)

    def _list_passes(self, numbers: Iterable[int]) -> list[BackwardPass]:
        return [self._passes[number] for number in sorted(set(numbers)) if number in self._passes]

    def after_step(self, optimizer: Any) -> None:
        """Take note that the gradients have been used."""
        for held in self.list_held(optimizer):
            held.passes, held.dropped, held.stale, held.latest = [], [], None, None
            held.after_step = held.identify()
            held.written = count_writes(read_local(held.parameter))


def _is_stale(samples: list[Sample | None]) -> bool:
    """Return whether a step used the gradients of the step before again, in all watched parameters."""
    if not all(sample is not None for sample in samples):
        return False
    return any(value for sample in samples if sample is not None for value in sample.value or ())
