"""Counts floating-point operations of a part of a forward or backward."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class FlopCounter(FlopCounterMode):
    """torch's counter without its hooks on modules.

    It is read for the total only. torch's tracker of modules registers hooks on their inputs that raise in
    `torch.autograd.grad`, as a gradient penalty calls it. And the hooks call functions of torch in the middle
    of a forward, which `stages/walk.py` would count as the model's.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _NoModules()


class _NoModules:
    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
