"""Counts floating-point operations of a part of a forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


class FlopCounter(FlopCounterMode):
    """torch's counter without its hooks on modules.

    It is read for the total only. torch's tracker of modules registers hooks on their inputs that raise in
    `torch.autograd.grad`, as a gradient penalty calls it. And the hooks call functions of torch in the middle
    of a forward, which `stages/walk.py` would count as the model's.

    torch's counter replaces operations that are compositions of others by these. For SiLU's gradient that
    gives other last bits. Under ep, a rank computes rows of microbatches that another rank counts, so counted
    and uncounted rows must have the same bits.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={torch.ops.aten.silu_backward.default: _count_nothing})
        self.mod_tracker: Any = _NoModules()


def _count_nothing(*_: Any, **__: Any) -> int:
    return 0


class _NoModules:
    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
