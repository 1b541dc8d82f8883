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
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.comm import one_tensor
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.torch_seams.tensors import is_fake

P = ParamSpec("P")


def seen_by_modes(
    function: Callable[Concatenate[Tensor, P], Tensor],
) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Decorate a function of a tensor so that modes for functions of torch see its calls."""

    @wraps(function)
    def seen(tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if has_torch_function_unary(tensor):
            return handle_torch_function(seen, (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return seen


def differentiate(
    run: Callable[..., Tensor], back: Callable[..., Tensor], tensor: Tensor, *given: Any
) -> Tensor:
    """Return `run(tensor, *given)`, whose gradient is `back(gradient, *given)`."""
    result: Tensor = _Pair.apply(tensor, run, back, given)  # type: ignore[no-untyped-call]
    return result


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, run: Callable[..., Tensor], back: Callable[..., Tensor], given: Any
    ) -> Tensor:
        ctx.back, ctx.given = back, given
        return run(tensor, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.back is not _once:
            refuse_graph()
        return ctx.back(grad, *ctx.given), None, None, None


@seen_by_modes
def copy(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor; its gradient is summed over the ranks."""
    return differentiate(_same, all_reduce, tensor, axis)


@seen_by_modes
def add_up(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks' tensors."""
    return differentiate(all_reduce, lambda grad, _: grad, tensor, axis)


@seen_by_modes
def gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' parts joined along a dimension; all ranks then compute the same with them."""
    return differentiate(all_gather, own_part, tensor, axis, dim)


@seen_by_modes
def gather_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' parts joined along a dimension; each rank then uses its part of the parameters."""
    return differentiate(all_gather, reduce_scatter, tensor, axis, dim)


@seen_by_modes
def add_up_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of the sum of the ranks' tensors."""
    return differentiate(reduce_scatter, all_gather, tensor, axis, dim)


@seen_by_modes
def take_rows(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    return differentiate(own_part, all_gather, tensor, axis, dim)


@seen_by_modes
def keep_once(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor; of a gradient that all ranks have and that is summed later, one rank keeps it."""
    return differentiate(_same, _once, tensor, axis)


def sums_gradient(node: Any) -> bool:
    """Return whether a node of autograd sums the gradient over the ranks, in `copy` or `gather_rows`."""
    return getattr(node, "back", None) in (all_reduce, reduce_scatter)


def _same(tensor: Tensor, _: Axis) -> Tensor:
    return tensor.view_as(tensor)


def _once(grad: Tensor, axis: Axis) -> Tensor:
    return grad if axis.rank == 0 else torch.zeros_like(grad)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks in a new tensor; no autograd."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if is_fake(tensor):
        return total
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' tensors, which have the same shape, joined along a dimension; no autograd."""
    parts = tensor.new_empty(axis.size, *tensor.shape)
    if not is_fake(tensor):
        one_tensor.all_gather(parts.view(-1), tensor.contiguous().view(-1), group=axis.group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of the sum over the ranks; no autograd."""
    parts = torch.stack(tensor.chunk(axis.size, dim))
    own = parts[axis.rank]
    if is_fake(tensor):
        return own.clone()
    if tensor.is_cuda:
        total = torch.empty_like(own)
        one_tensor.reduce_scatter(total.view(-1), parts.view(-1), group=axis.group)
        return total
    # gloo's own reduce-scatter takes longer than sending the parts and adding them here.
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
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
    """
    if torch.is_grad_enabled():
        raise second_gradient_error("backward runs with create_graph=True.")


def second_gradient_error(saw: str) -> PacelineError:
    """Return the error for a gradient of a gradient."""
    return PacelineError(
        "PL436",
        saw=saw,
        rule="Under tp, backward has collectives between the ranks, which cannot be differentiated again, "
        "as a gradient penalty requires.",
        fix="Use dp_replicate, which gives the bits of one process.",
    )
