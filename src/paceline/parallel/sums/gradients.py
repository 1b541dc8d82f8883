"""Takes gradients from parameters, adds them, and lays them end to end in one vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm.tree_exchange import nothing_like
from paceline.errors import PacelineError
from paceline.torch_seams.operators import add_to_each

# Per parameter, in a fixed order; `None` if no gradient reached it.
Gradients = list[Tensor | None]


def take_gradients(parameters: Sequence[Tensor]) -> Gradients:
    """Return the gradients of parameters, and take them off."""
    settle_conjugates(parameters)
    gradients: Gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    if any(g is not None and g.layout != torch.strided for g in gradients):
        raise sparse_error("a gradient is a sparse tensor.")
    return gradients


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum, in place of `right`. A missing gradient adds nothing, not even the sign of a zero."""
    lefts, rights = list_present(left), list_present(right)
    if len(lefts) < len(left) or len(rights) < len(right):
        pairs = zip(left, right, strict=True)
        added = [b if a is None else a if b is None else b.add_(a) for a, b in pairs]
    else:
        add_to_each(rights, lefts)
        added = right
    for gradient in lefts:
        keep_for_stream(gradient)
    return added


def keep_for_stream(tensor: Tensor) -> None:
    """Keep a tensor's memory until the current stream has read it, before the host drops the tensor."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def settle_conjugates(parameters: Iterable[Tensor]) -> None:
    """Write out gradients that autograd leaves as views to be conjugated, which foreach kernels refuse."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()


def list_present(gradients: Gradients) -> list[Tensor]:
    """Return the gradients without those that are missing."""
    return [gradient for gradient in gradients if gradient is not None]


# ---- vectors


def flatten(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return the numbers of a gradient in the order of the parameter's memory; what adds nothing for none."""
    if gradient is None:
        return nothing_like(parameter).reshape(-1)
    return gradient.permute(_order_memory(parameter)).reshape(-1)


def view_as(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the view of a vector that `flatten` would make of it."""
    order = _order_memory(parameter)
    whole = part.view([parameter.shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(parameter.dim())])


def view_bucket(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that a bucket of DDP holds, with the strides that DDP gave them.

    `GradBucket.gradients()` ignores strides, so a channels-last weight would be read in another order. DDP's
    buckets have the two real numbers of each complex one.
    """
    views, start = [], 0
    for parameter in parameters:
        is_paired = parameter.is_complex() and not buffer.is_complex()
        part = buffer[start : start + parameter.numel() * (2 if is_paired else 1)]
        start += part.numel()
        views.append(view_as(torch.view_as_complex(part.view(-1, 2)) if is_paired else part, parameter))
    assert start == buffer.numel()
    return views


def _order_memory(parameter: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory, as DDP lays out gradients.

    It keeps the strides of a parameter only if these leave no gaps.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return list(range(parameter.dim()))
    return sorted(range(parameter.dim()), key=lambda dim: (-parameter.stride()[dim], dim))


# ---- sparse gradients


def check_dense(model: nn.Module) -> None:
    """Raise PL425 for layers whose gradients are sparse."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise sparse_error(f"{name} ({type(module).__name__}) is built with sparse=True.")


@contextmanager
def explaining_sparse() -> Iterator[None]:
    """Raise PL425 in place of torch's errors for a gradient of a function called with sparse=True."""
    try:
        yield
    except RuntimeError as error:
        if "Sparse" in str(error):
            raise sparse_error("a gradient is a sparse tensor.") from error
        raise


def sparse_error(saw: str) -> PacelineError:
    """Return the error for a sparse gradient."""
    return PacelineError(
        "PL425",
        saw=saw,
        rule="Gradients are added over microbatches and ranks element by element.",
        fix="Build the layer with sparse=False; SGD and Adagrad then give the same weights.",
    )
