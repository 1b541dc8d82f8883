"""Collectives between the ranks of tp, as functions that autograd can differentiate.

| function      | forward                          | backward                         |
|---------------|----------------------------------|----------------------------------|
| `copy`        | nothing                          | all-reduce                       |
| `add_up`      | all-reduce                       | nothing                          |
| `gather`      | all-gather                       | this rank's part                 |
| `gather_rows` | all-gather                       | reduce-scatter                   |
| `add_up_rows` | reduce-scatter                   | all-gather                       |
| `take_rows`   | this rank's part                 | all-gather                       |
| `keep_once`   | nothing                          | zeros, but on the first rank     |

Modes for functions of torch see them like torch's own. On tensors without numbers they return shapes and
communicate nothing.

Those of rows are those of sequence parallelism (Korthikanti et al. 2022, section 4.2.2): an all-gather and a
reduce-scatter together carry the bytes of the all-reduce that they replace. All ranks of the axis must call
these functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.torch_seams.tensors import is_fake


def copy(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor; its gradient is summed over the ranks."""
    if has_torch_function_unary(tensor):
        return show(copy, tensor, axis)
    result: Tensor = _Copy.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return result


def add_up(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks' tensors."""
    if has_torch_function_unary(tensor):
        return show(add_up, tensor, axis)
    result: Tensor = _AddUp.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return result


def gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' parts joined along a dimension; all ranks then compute the same with them."""
    if has_torch_function_unary(tensor):
        return show(gather, tensor, axis, dim)
    result: Tensor = _Gather.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]
    return result


def gather_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' parts joined along a dimension; each rank then uses its part of the parameters."""
    if has_torch_function_unary(tensor):
        return show(gather_rows, tensor, axis, dim)
    result: Tensor = _GatherRows.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]
    return result


def add_up_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of the sum of the ranks' tensors."""
    if has_torch_function_unary(tensor):
        return show(add_up_rows, tensor, axis, dim)
    result: Tensor = _AddUpRows.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]
    return result


def take_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    if has_torch_function_unary(tensor):
        return show(take_rows, tensor, axis, dim)
    result: Tensor = _TakeRows.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]
    return result


def keep_once(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor; of a gradient that all ranks have and that is summed later, one rank keeps it."""
    if has_torch_function_unary(tensor):
        return show(keep_once, tensor, axis)
    result: Tensor = _KeepOnce.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return result


def show(function: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
    """Call a function on a tensor through the modes for functions of torch that are active."""
    result: Tensor = handle_torch_function(function, (tensor,), tensor, *args)
    return result


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks in a new tensor; no autograd."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if is_fake(tensor):
        return total
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' tensors, which have the same shape, joined along a dimension; no autograd."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(axis.size)]
    if is_fake(tensor):
        return torch.cat(parts, dim)
    dist.all_gather(parts, tensor, group=axis.group)
    return torch.cat(parts, dim)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of the sum over the ranks; no autograd."""
    parts = [part.contiguous() for part in tensor.chunk(axis.size, dim)]
    own = parts[axis.rank]
    if is_fake(tensor):
        return own.clone()
    if tensor.is_cuda:
        total = torch.empty_like(own)
        dist.reduce_scatter(total, parts, group=axis.group)
        return total
    # gloo's own reduce-scatter takes longer than sending the parts and adding them here.
    received = own.new_empty(axis.size, *own.shape)
    dist.all_to_all_single(received, torch.stack(parts), group=axis.group)
    first, *others = received.unbind(0)
    for part in others:
        first += part
    return first.clone()


def own_part(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return a contiguous copy of this rank's part along a dimension."""
    return tensor.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)


def refuse_graph() -> None:
    """Raise in a backward that is itself recorded for another backward.

    The collectives of a backward have no gradient, so the other one would silently get a wrong number.

    Raises:
        PacelineError: PL437.
    """
    if torch.is_grad_enabled():
        raise second_gradient_error("backward runs with create_graph=True.")


def second_gradient_error(saw: str) -> PacelineError:
    """Return the error for a gradient of a gradient."""
    return PacelineError(
        "PL437",
        saw=saw,
        rule="Under tp, backward has collectives between the ranks, which cannot be differentiated again, "
        "as a gradient penalty requires.",
        fix="Use dp_replicate, which gives the bits of one process.",
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return all_reduce(grad, ctx.axis), None


class _KeepOnce(_Copy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.axis.rank == 0 else torch.zeros_like(grad), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return own_part(grad, ctx.axis, ctx.dim), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _AddUpRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_part(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return all_gather(grad, ctx.axis, ctx.dim), None, None


# The names of the backwards that sum over tp, as `verify` finds them in autograd's graph.
ADDING_UP = tuple(f"{kind.__name__}Backward" for kind in (_Copy, _GatherRows))
