"""Compares the forwards of the first step with those of one process, to the bit.

Later steps start from weights that differ by rounding, so only the first one can show whether a layout leaves
the bits of a forward as they are. What a forward returns, and its loss, are kept as a digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.data.share import Share
from paceline.recipe import Layout
from paceline.torch_seams.trees import tree_leaves
from paceline.train.batches import weigh
from paceline.train.trainer import Trainer
from paceline.verifying.observe import digest, find_running, is_trial, wrap_functions
from paceline.verifying.watch import take_matching


class ForwardBits:
    """The digests of what this rank's forwards of the first step return.

    Args:
        trainer: before its first step.

    Attributes:
        digests: by number of a microbatch, as text: the output and the loss, if this rank has them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.digests: dict[str, str] = {}
        self._trainer = trainer
        self._waiting: list[tuple[int, Any]] = []
        self._numbers: list[int] = []
        self._running = -1
        wrap_functions(trainer, self._forward, self._loss)

    def before_step(self, number: int, share: Share) -> None:
        """Keep what the first step's forwards return, which trains on `share`."""
        self._waiting = list(share.microbatches) if number == 1 else []
        self._numbers = [each for each, _ in self._waiting]

    def _forward(self, inner: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        self._running = -1
        if self._numbers and not is_trial(self._trainer):
            place = find_running(self._trainer)
            if place is None:
                self._running = take_matching(self._trainer, self._waiting, batch)
            else:
                self._running = self._numbers[place]
        return inner(model, batch)

    def _loss(self, inner: Callable[..., Any], output: Any, batch: Any) -> Any:
        result = inner(output, batch)
        if self._running >= 0 and self._numbers and not is_trial(self._trainer):
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.digests[str(self._running)] = digest([*leaves, *weigh(result, batch)])
        return result


def keeps_outputs(layout: Layout) -> bool:
    """Return whether a rank has whole outputs: tp leaves a vocabulary divided."""
    return layout.tp == 1


def compare_digests(digests: Mapping[str, str], expected: Mapping[str, str]) -> bool | None:
    """Return whether all forwards of a rank have the reference's bits; `None` if it has no outputs."""
    if not digests:
        return None
    return all(expected.get(number) == found for number, found in digests.items())
