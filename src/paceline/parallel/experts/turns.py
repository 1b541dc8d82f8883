"""Checks that a forward calls each mixture once and in order, as ranks without a microbatch expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError


class Turns:
    """The order of the mixtures in a forward, on which ranks without a microbatch rely.

    Args:
        names: of the mixtures, in the order of the definition.
        goes_in_stages: whether a forward calls the mixtures of one stage alone.

    Attributes:
        num_forwards: of the model in this round, whose mixtures were called.
    """

    def __init__(self, names: list[str], *, goes_in_stages: bool) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._goes_in_stages = goes_in_stages
        self.num_forwards = 0
        # Outside of the model's forward, where blocks are recomputed, nothing is checked.
        self._called: list[str] | None = None

    def begin(self, _module: nn.Module, _args: Any) -> None:
        """Begin the model's forward."""
        self._called = []

    def take(self, name: str) -> None:
        """Note the call of a mixture."""
        if self._called is None:
            return
        if not self._called and torch.is_grad_enabled():
            self.num_forwards += 1
            if self.num_forwards > 1:
                raise _turn_error("the model is called twice for one microbatch.")
        if self._called and self._places[name] <= self._places[self._called[-1]]:
            raise _turn_error(f"{name} is called after {self._called[-1]}.")
        self._called.append(name)

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """End the model's forward."""
        called, self._called = self._called, None
        if called and not self._goes_in_stages and len(called) < len(self._places):
            missing = next(name for name in self._places if name not in called)
            raise _turn_error(f"a forward calls {called[0]} and not {missing}.")


def _turn_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL661",
        saw=saw,
        rule="Under ep, the forward of each microbatch calls each mixture once, in the order in which the "
        "model defines them. Ranks without a microbatch left take part in these exchanges.",
        fix="Call the model once per microbatch and all of its mixtures in that order, or leave ep out.",
    )
