"""Runs operations only for the shapes of their results; not in `dispatch`, because its import is slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.torch_seams.dispatch import TorchDispatchMode
from paceline.torch_seams.installed import checked
from paceline.torch_seams.operators import GROUPED_MM
from paceline.torch_seams.trees import tree_map_only

with checked("fake"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# The logger to which torch reports a fake operation that fails.
LOGGER = FakeTensorMode.__module__

__all__ = ["LOGGER", "FakeTensor", "FakeTensorMode", "RunFake", "run_fake"]


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on fake tensors, also for types that torch's fake kernel refuses without need."""
    if func is not GROUPED_MM or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    # On fake tensors it requires bf16, though its kernel accepts the types that mixtures of experts use.
    narrow = tree_map_only(
        Tensor, lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor, args
    )
    return func(*narrow, **kwargs).to(args[0].dtype)


class RunFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every operation runs by `run_fake`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_fake(func, args, kwargs or {})
