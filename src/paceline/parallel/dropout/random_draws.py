"""Finds the random draws of a forward that `replacements.py` does not make: for `paceline verify`.

On different data-parallel layouts such draws are still the same, because all generators are seeded before
every microbatch. They change with the microbatch's size and with the draws before them. Tensor-parallel
ranks, or ranks with parts of a sequence, may draw the same numbers for different elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from paceline.finding import Finding
from paceline.torch_seams.dispatch import TorchDispatchMode, read_schema

_NO_DRAW = {"aten::_fused_sdp_choice", "paceline::keep"}


def find_random(model: nn.Module, run: Callable[[], Any]) -> list[Finding]:
    """Return the random operations of a forward, by module and operation, in the order of their first use.

    Args:
        model: its modules are named; its dropout counts unless `run` is inside `Masks.drawing`.
        run: does the forward, in train mode and not compiled (draws in compiled code are not detected).

    Returns:
        PL450 per module and operation; PL453 if Python's or numpy's global generator was used, or torch's by
        code that is not an operation of torch (a kernel of another library).
    """
    names = {id(module): name for name, module in model.named_modules()}
    stack: list[nn.Module] = []

    def enter(module: nn.Module, _args: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        while stack and stack.pop() is not module:
            pass  # left by a forward that raised

    watch = _Watch(lambda: next((m for m in reversed(stack) if id(m) in names), None), names)
    before = _read_generators()
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    moved = [kind for kind, state in _read_generators().items() if state != before[kind]]
    if watch.found and "torch" in moved:
        moved.remove("torch")  # used by the operations found
    return [*watch.found.values(), *(_drawn_unseen(kind) for kind in moved)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records random operations and does not change them."""

    def __init__(self, find_module: Callable[[], nn.Module | None], names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[str, str], Finding] = {}
        self._find_module = find_module
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            module = self._find_module()
            where = self._names[id(module)] if module is not None else ""
            key = where, func.name()
            if key not in self.found:
                self.found[key] = _drawn_by_torch(where, module, func.name())
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call really draws; attention without dropout, or dropout in eval mode, does not."""
    if read_schema(func).name in _NO_DRAW:
        return False
    arguments = read_schema(func).arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    values |= kwargs
    if values.get("train", True) is False or values.get("training", True) is False:
        return False
    return "dropout_p" not in values or bool(values["dropout_p"])


def _read_generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "random": random.getstate(),
        "numpy.random": (numpy[1].tobytes(), *numpy[2:]),
        "torch": [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpu)],
    }


def _drawn_by_torch(where: str, module: nn.Module | None, operation: str) -> Finding:
    by = "outside of the model" if module is None else f"by {type(module).__name__}"
    return Finding(
        "PL450",
        where=where or "the model",
        saw=f"{operation} draws random numbers, {by}.",
        rule="They come from the rank's generator, so they change with microbatch_size, and ranks that "
        "share a sample may draw the same numbers for different elements.",
        fix="Draw with nn.Dropout, F.dropout or dropout in F.scaled_dot_product_attention, or turn it off.",
    )


def _drawn_unseen(kind: str) -> Finding:
    return Finding(
        "PL453",
        where="the model",
        saw=f"its forward draws from {kind}'s generator, at an unknown place.",
        rule="That generator belongs to the rank, so the numbers change with microbatch_size.",
        fix="Draw in the data set, where numbers depend only on the sample, or turn it off.",
    )
