"""Finds the tensors that outlive a forward: in attributes, in lists that hooks fill, in any container.

A trial forward without numbers leaves the model as it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn

from paceline.torch_seams.modules import list_forward_hooks, own_buffers

P = ParamSpec("P")
R = TypeVar("R")


def leaves_as_found(trial: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorate a trial forward of a model, so that the model has no tensors without numbers afterwards."""

    @wraps(trial)
    def run(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _left_as_found(model):
            return trial(model, *args, **kwargs)

    return run


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore the attributes, hooks and buffers of modules that a forward inside the context changes.

    A first forward may keep a table of angles, and must not keep one without numbers. It may also add hooks,
    and an attribute that says so (transformers, to collect the scores of routers). If only the attribute were
    restored, the next forward would add the hooks once more.
    """
    before = [(module, dict(vars(module)), dict(own_buffers(module))) for module in model.modules()]
    saved = [
        (buffer, buffer.clone())
        for *_, buffers in before
        for buffer in buffers.values()
        if buffer is not None and not buffer.is_meta
    ]
    hooks = [(found, set(found)) for module, *_ in before for found in list_forward_hooks(module)]
    try:
        yield
    finally:
        for found, kept in hooks:
            for key in set(found) - kept:
                del found[key]
        for module, attributes, buffers in before:
            for key in [key for key in vars(module) if key not in attributes]:
                del module.__dict__[key]
            module.__dict__.update(attributes)
            own = own_buffers(module)
            for key in own.keys() - buffers.keys():
                del own[key]
            own.update(buffers)
        for buffer, value in saved:
            buffer.data.copy_(value)


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
