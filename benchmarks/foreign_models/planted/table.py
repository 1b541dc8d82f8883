"""The table of faults planted into foreign models, as users make them, and the way into `verify`.

Each states beforehand what `verify` must report: a code, a place, and words that name the cause. `right` is
true if all three are in the finding. The faults of `tests/verifying/faults` are others: they change Paceline.

A fault acts in layouts only (`num_ranks() > 1`), mostly on rank 1; the reference stays right. Some models
need a part that is written for the fault (a layer that keeps its weight): one process has it too, and it is
right there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from benchmarks.foreign_models.planted import buffers, data, hooks, modules, optimizers, reductions
from benchmarks.foreign_models.planted.fault import Fault
from benchmarks.foreign_models.zoo import SIZE, ZOO
from paceline.verifying.check import build_default_optimizer

FAULTS: dict[str, Fault] = {
    **modules.FAULTS,
    **hooks.FAULTS,
    **data.FAULTS,
    **optimizers.FAULTS,
    **reductions.FAULTS,
    **buffers.FAULTS,
}
"""By name, in the order of the table."""


def build_planted(name: str) -> nn.Module:
    """The model of a fault, changed."""
    fault = FAULTS[name]
    model = ZOO[fault.model].build(SIZE)
    if fault.change is not None:
        fault.change(model)
    return model


def call_planted(name: str, part: str, *args: Any) -> Any:
    """The batches, forward, loss or optimizer of a fault."""
    fault = FAULTS[name]
    right = build_default_optimizer if part == "optimizer" else getattr(ZOO[fault.model], part)
    if part == "make_batch":
        right = partial(right, SIZE)
    wrong = fault.wrap.get(part)
    return right(*args) if wrong is None else wrong(right, *args)


def verify_arguments(name: str) -> dict[str, Any]:
    """Arguments of `UserSubject` for a fault."""
    return {
        "model_fn": partial(build_planted, name),
        "batch_fn": partial(call_planted, name, "make_batch"),
        "forward": partial(call_planted, name, "forward"),
        "loss": partial(call_planted, name, "loss"),
        "optimizer": partial(call_planted, name, "optimizer"),
        "settings": FAULTS[name].settings,
    }


def run_patched(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn(*args)` while the patch of a fault is in force."""
    fault = FAULTS[name]
    if fault.patch is None or not (fault.everywhere or os.environ.get("RANK") == "1"):
        return fn(*args)
    with mock.patch.object(*fault.patch):
        return fn(*args)
