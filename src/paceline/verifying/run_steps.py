"""Runs the compared steps, and passes every number and tensor on the way to an observer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from paceline.data.share import Share
from paceline.train.trainer import Trainer
from paceline.verifying.observe import are_apart, list_optimizer_state, list_tensors, take_local

if TYPE_CHECKING:
    from paceline.verifying.watch import Watch

# In the order in which a step produces them, so that the first kind that differs is the first difference.
KINDS = ("initial", "weight of the batch", "loss", "gradient", "norm", "weight", "buffer", "optimizer")


class Observer(Protocol):
    """An observer of the numbers and tensors of the steps."""

    def number(self, step: int, kind: str, value: float) -> None:
        """Receive the loss, the weight of the batch or the global norm of a step."""

    def tensor(self, step: int, kind: str, name: str, owner: str, tensor: Tensor) -> None:
        """Receive this rank's part of a tensor, which is valid during the call only.

        It is laid out as the parameter or buffer `owner` if its shape is the same.
        """


def run_steps(
    trainer: Trainer,
    shares: Iterator[Share],
    num_steps: int,
    observer: Observer,
    watch: Watch | None = None,
) -> None:
    """Take `num_steps` optimizer steps; collective.

    Order: initial weights and buffers as step 0; per step gradients (after reduction, before clipping), the
    batch's weight, loss and global norm, weights and buffers; at the end the optimizer's state. Of islands
    after their warm-up, only the global weights and statistics. `watch` adds the tensors at the boundaries of
    modules in one step.

    Raises:
        StopIteration: never; `shares` has no end.
    """
    show_state(trainer, 0, observer, initial=True)
    current = 0

    def show_gradients(gradients: dict[str, Tensor]) -> None:
        if are_apart(trainer):
            return
        for name, gradient in gradients.items():
            observer.tensor(current, "gradient", name, name, take_local(gradient))

    trainer.on_gradients(show_gradients)
    for number in range(1, num_steps + 1):
        current = number
        share = next(shares)
        with nullcontext() if watch is None else watch.watching(number, share):
            step = trainer.step(share)
        if not are_apart(trainer):
            update = next(iter(step.updates.values()))
            observer.number(number, "weight of the batch", update.weight)
            observer.number(number, "loss", math.nan if step.skipped else update.loss)
            observer.number(number, "norm", update.grad_norm)
        show_state(trainer, number, observer)
    if are_apart(trainer):
        return
    for name, key, tensor in list_optimizer_state(trainer):
        observer.tensor(num_steps, "optimizer", f"{name} {key}", name, tensor)


def show_state(trainer: Trainer, step: int, observer: Observer, *, initial: bool = False) -> None:
    """Show the observer the weights and buffers as they are after `step`."""
    for kind, name, tensor in list_tensors(trainer):
        observer.tensor(step, "initial" if initial else kind, name, name, tensor)
