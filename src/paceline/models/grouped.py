"""Products of sorted rows with a matrix per group, as operations with shapes that are known beforehand.

The sizes of the groups are values of a tensor. As one operation, a product's result still has a shape that
depends on no value, so it runs on tensors without numbers: for pipelines, plans and `torch.compile`.

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


def add_to_groups(rows: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    """Return each group of rows plus its own bias; of two types, the wider one.

    Args:
        rows: [rows, width], those of a group one behind the other.
        biases: [groups, width].
        counts: rows of each group, int64 [groups]; they add up to `rows`.
    """
    dtype = torch.promote_types(rows.dtype, biases.dtype)
    total: Tensor = _grouped_add(rows.to(dtype), biases.to(dtype), counts)
    return total


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


@torch.library.custom_op("paceline::grouped_add", mutates_args=())
def _grouped_add(rows: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    parts = [rows[start:stop] + biases[group] for group, start, stop in _list_groups(counts)]
    return torch.cat(parts) if parts else rows.clone()


@_grouped_add.register_fake
def _(rows: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    return torch.empty_like(rows)


@torch.library.custom_op("paceline::grouped_sum", mutates_args=())
def _grouped_sum(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the rows of each group; zeros for an empty one."""
    total = rows.new_zeros(len(counts), rows.shape[1])
    for group, start, stop in _list_groups(counts):
        total[group] = _align(rows[start:stop]).sum(0)
    return total


@_grouped_sum.register_fake
def _(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], rows.shape[1])


def _keep_counts(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _differentiate_add(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    needs_rows, needs_biases, _ = ctx.needs_input_grad
    (counts,) = ctx.saved_tensors
    return (
        gradient if needs_rows else None,
        _grouped_sum(gradient.contiguous(), counts) if needs_biases else None,
        None,
    )


_grouped_add.register_autograd(_differentiate_add, setup_context=_keep_counts)


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
