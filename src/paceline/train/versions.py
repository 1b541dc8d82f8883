"""Weights of an earlier step, and gradients that one rank has computed alone: the parts of stale updates."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Weights, and the power of two by which losses are divided.
Version = tuple[list[Tensor], float | None]


class Pushed(NamedTuple):
    """A gradient over a global batch that one rank has computed alone.

    Attributes:
        unit: the power of two by which its losses were divided.
        agreement: the vector that ranks would share, see `Agreement`.
        gradients: of all trained parameters; `None` for those without.
    """

    unit: float
    agreement: Tensor
    gradients: list[Tensor | None]
