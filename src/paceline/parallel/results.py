"""Finds the tensors that outlive a forward: in attributes, in lists that hooks fill, in any container."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

from torch import Tensor


def list_held(tensors: Sequence[Tensor], own: Collection[int]) -> list[tuple[int, Any]]:
    """Return the numbers of the tensors that some object still refers to, each with that object.

    Args:
        tensors: of a forward that has ended.
        own: ids of objects that do not count, because they belong to the caller.
    """
    gc.collect()
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    return [
        (numbers[id(each)], holder)
        for holder in gc.get_referrers(*tensors)
        if holder is not tensors and id(holder) not in own and not isinstance(holder, FrameType)
        for each in gc.get_referents(holder)
        if id(each) in numbers
    ]
