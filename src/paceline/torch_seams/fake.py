"""Runs operations only for the shapes of their results; not in `dispatch`, because its import is slow."""

from __future__ import annotations

from paceline.torch_seams.check import checked

with checked("fake"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# The logger to which torch reports a fake operation that fails.
LOGGER = FakeTensorMode.__module__

__all__ = ["LOGGER", "FakeTensor", "FakeTensorMode"]
