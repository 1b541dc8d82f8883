"""A product of sorted rows with a matrix per group, as one operation with a shape that is known beforehand.

The sizes of the groups are values of a tensor. As one operation, its result still has a shape that depends on
no value, so it runs on tensors without numbers: for pipelines, plans and `torch.compile`.

The bits of a group depend on its own rows alone: not on the other groups, nor on where its rows are in
memory. An empty group costs nothing, and its matrix gets a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

# Kernels may choose another order of sums for data that begins elsewhere in a line of the cache.
_ALIGNMENT_BYTES = 64


def multiply_groups(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each group of rows times the transpose of its own matrix; under autocast in its type.

    Args:
        rows: [rows, width], those of a group one behind the other.
        weights: [groups, outputs, width].
        counts: rows of each group, int64 [groups]; they add up to `rows`.

    Returns:
        [rows, outputs].
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    product: Tensor = _grouped_linear(rows, weights, counts)
    return product


@torch.library.custom_op("paceline::grouped_linear", mutates_args=())
def _grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    parts = [
        functional.linear(_align(rows[start:stop]), _align(weights[group]))
        for group, start, stop in _list_groups(counts)
    ]
    return torch.cat(parts) if parts else rows.new_zeros(0, weights.shape[1])


@_grouped_linear.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@torch.library.custom_op("paceline::grouped_gradient", mutates_args=())
def _grouped_gradient(rows: Tensor, gradient: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the matrices: per group, the products of the rows summed over them."""
    total = rows.new_zeros(len(counts), gradient.shape[1], rows.shape[1])
    for group, start, stop in _list_groups(counts):
        total[group] = _align(gradient[start:stop]).t() @ _align(rows[start:stop])
    return total


@_grouped_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], gradient.shape[1], rows.shape[1])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    gradient = gradient.contiguous()
    needs_rows, needs_weights, _ = ctx.needs_input_grad
    return (
        _grouped_linear(gradient, weights.transpose(1, 2), counts) if needs_rows else None,
        _grouped_gradient(rows, gradient, counts) if needs_weights else None,
        None,
    )


_grouped_linear.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula([torch.ops.paceline.grouped_linear, torch.ops.paceline.grouped_gradient])
def _count_flops(rows: Any, other: Any, counts: Any, *_: Any, **__: Any) -> int:
    outputs: int = other[1]  # of the matrices, or of the gradient
    return 2 * int(rows[0]) * int(rows[1]) * outputs


def _list_groups(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield number, first row and last row (excluded) of each group that has rows."""
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield group, start, start + count
        start += count


def _align(part: Tensor) -> Tensor:
    return part if part.data_ptr() % _ALIGNMENT_BYTES == 0 else part.clone()
