"""Notes of a script's numbers what shows its mistakes, in the first backward passes and then in some.

Nothing here issues a collective, draws a random number, waits for a device, or raises into the script. The
facts travel with the watch's beats, and the launcher compares those of the ranks. Between looks all hooks
are off but those of `gradients`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from paceline.torch_seams.observing import list_observed, observe
from paceline.torch_seams.profiling import is_profiling
from paceline.torch_seams.watching import hide_from_compiler
from paceline.watch.protocol.report import Fact
from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.sentinels.copies import ReplicatedModels
from paceline.watch.rank.sentinels.exchange import ExchangedBytes
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.sentinels.passes import Passes
from paceline.watch.rank.sentinels.sampler_order import Orders
from paceline.watch.rank.sentinels.shared_files import Files
from paceline.watch.rank.threads import mark_stack

# Passes that are looked at: the first ones, and then some of each round.
_FIRST = 64
_ROUND = 512
_OF_ROUND = 6
_MOST_INPUTS = 64


class Sentinels:
    """What is noted of this process's training.

    Attributes:
        error: that has ended it.

    Args:
        gradients: the watched parameters, whose hooks it uses.
        count_transfers: returns the number of sends and receives so far.
    """

    def __init__(self, gradients: Gradients, count_transfers: Callable[[], int]) -> None:
        self.error: Exception | None = None
        self._gradients = gradients
        self._outbox = Outbox()
        self._exchange = ExchangedBytes(self._outbox, count_transfers)
        self._is_over = True
        self._torch: Any = None
        self._copies: ReplicatedModels
        self._passes: Passes
        self._orders: Orders
        self._files: Files
        self._note_gradient: Callable[..., None]
        # Once an epoch or a checkpoint, so always on; and around steps, as torch may be going through hooks.
        self._end_all: list[Callable[[], None]] = []
        self._end_look: list[Callable[[], None]] = []

    def install(self, torch: Any) -> None:
        """Begin the first look; call it once."""
        self._torch, self._is_over = torch, False
        self._orders = Orders(self._gradients, self._outbox)
        self._copies = ReplicatedModels(torch, self._gradients, self._outbox, self._exchange, self._orders)
        self._passes = Passes(
            torch, self._gradients, self._outbox, self._copies.find_exchange, self._copies.after_pass
        )
        self._files = Files(torch, self._gradients, self._outbox)
        self._note_gradient = self._guard(self._passes.note_gradient)
        hide_from_compiler(torch, self._note_gradient)  # one code for all that torch calls
        places = list_observed(torch)
        for name, before, after in (
            ("order", None, self._guard(self._orders.begin_round)),
            ("save", self._guard(self._files.note_save), None),
            ("load", self._guard(self._files.note_load), None),
            ("random", self._guard(self._files.note_random_state), None),
            ("random_state", self._guard(self._files.note_random_state), None),
        ):
            if name in places:
                self._end_all.append(observe(torch, places[name], before, after))
        module = sys.modules[torch.optim.Optimizer.__module__]
        self._end_all += [
            module.register_optimizer_step_pre_hook(self._while_looking(self._before_step)).remove,
            module.register_optimizer_step_post_hook(self._while_looking(self._passes.after_step)).remove,
        ]
        self._begin_look()

    def end(self) -> None:
        """Send what is known at the script's end, and take off all hooks."""
        with suppress(Exception):
            if not self._is_over:
                self._orders.check()
                is_split = self._orders.has_split or self._copies.has_met_ddp
                self._exchange.end(is_split=is_split, saved=set(self._files.saved))
                self._files.end(self._copies.wrapped)
        self._give_up()
        for end in self._end_all:
            end()
        self._end_all.clear()

    def _give_up(self) -> None:
        """Note nothing from now on."""
        self._is_over = True
        self._gradients.at_pass = 0, lambda: None
        self._stop_looking()

    def collect(self) -> tuple[Fact, ...]:
        """Return the facts since the last call; for the watching thread."""
        if self._torch is not None:
            self._orders.check()
        return self._outbox.drain()

    # ---- looks

    def _begin_look(self) -> None:
        self._gradients.observer = self._note_gradient
        places = list_observed(self._torch)
        for name, before, after in (
            ("forward", self._guard(self._before_forward), None),
            ("sharded_forward", None, self._guard(self._in_sharded_forward)),
            ("batch", self._guard(self._before_batch), None),
        ):
            if name in places:
                self._end_look.append(observe(self._torch, places[name], before, after))
        passes = self._gradients.passes
        last = passes + _OF_ROUND if passes else _FIRST
        self._gradients.at_pass = last + 1, self._pause

    def _pause(self) -> None:
        """End a look at the beginning of a pass."""
        self._stop_looking()
        self._passes.forget()
        self._copies.forget()
        passes = self._gradients.passes
        self._gradients.at_pass = passes - passes % _ROUND + _ROUND, self._begin_look

    def _stop_looking(self) -> None:
        self._gradients.observer = None
        while self._end_look:
            with suppress(Exception):
                self._end_look.pop()()

    # ---- what torch calls

    def _guard(self, note: Callable[..., None]) -> Callable[..., None]:
        """Return a function that does nothing from its first error on."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                if self._gradients.found is not None:
                    self._give_up()  # its hooks are off, so that no pass is counted
                elif is_profiling(self._torch):  # its rows are to show the script, and nothing else
                    if self._gradients.observer is not None:
                        self._pause()
                elif not (self._is_over or _is_capturing(self._torch)):
                    note(*args, **kwargs)
            except Exception as error:
                self.error = error
                self._give_up()

        return guarded

    def _while_looking(self, note: Callable[..., None]) -> Callable[..., None]:
        """Return a hook of an optimizer's step, which costs next to nothing between looks."""
        gradients, guarded = self._gradients, self._guard(note)

        def noted(optimizer: Any, args: Any, kwargs: Any) -> None:
            if gradients.observer is not None and not self._torch.compiler.is_compiling():
                guarded(optimizer)

        return noted

    def _before_forward(self, ddp: Any, *args: Any, **kwargs: Any) -> None:
        self._copies.before_forward(ddp, list(_list_leaves((args, kwargs))), self._passes.find)

    def _in_sharded_forward(self, result: Any, state: Any, module: Any, *inputs: Any) -> None:
        self._copies.before_sharded_forward(state, module, list(_list_leaves(inputs)))

    def _before_batch(self, iterator: Any) -> None:
        self._passes.num_batches += 1

    def _before_step(self, optimizer: Any) -> None:
        marks = mark_stack(sys._getframe(3))
        ranks, event = self._copies.before_step(optimizer, marks)
        if not ranks:
            # Parts of one parameter are not copies.
            held = [
                one for one in self._passes.list_held(optimizer) if one.passes and not one.watched.is_part
            ]
            self._copies.look_before_step(optimizer, held, marks)
        self._passes.before_step(optimizer, ranks, event)


def _is_capturing(torch: Any) -> bool:
    """Return whether a CUDA graph records what is called, and would repeat it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-any-return]


def _list_leaves(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield what a forward gets, without the containers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth:
        for one in value[:_MOST_INPUTS]:
            yield from _list_leaves(one, depth - 1)
    else:
        yield value
