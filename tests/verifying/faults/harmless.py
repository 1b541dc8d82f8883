"""Changes of last bits that a right layout may make, planted where no layout makes them: no alarm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from paceline.parallel.sums import gradient_sum
from paceline.parallel.tensor import differentiable


class _Split(torch.autograd.Function):
    """A linear layer whose three matrix products are sums of parts, as under tp; without its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, num_parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.num_parts = num_parts
        columns = zip(x.chunk(num_parts, -1), weight.chunk(num_parts, 1), strict=True)
        return sum(part @ columns.mT for part, columns in columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = zip(grad.chunk(ctx.num_parts, -1), weight.chunk(ctx.num_parts, 0), strict=True)
        flat = zip(
            grad.flatten(0, -2).chunk(ctx.num_parts), x.flatten(0, -2).chunk(ctx.num_parts), strict=True
        )
        return sum(part @ some for part, some in rows), sum(part.mT @ some for part, some in flat), None


def _split(num_parts: int) -> AbstractContextManager[Any]:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = _Split.apply(x, weight, num_parts)
        return product if bias is None else product + bias

    return mock.patch.object(functional, "linear", linear)


@contextlib.contextmanager
def products_in_2_parts() -> Iterator[None]:
    """Every matrix product of a linear layer is a sum of 2."""
    with _split(2):
        yield


@contextlib.contextmanager
def products_in_8_parts() -> Iterator[None]:
    """Every matrix product of a linear layer is a sum of 8."""
    with _split(8):
        yield


@contextlib.contextmanager
def tp_sums_backwards() -> Iterator[None]:
    """Sums over tp are added from the last rank to the first."""

    def all_reduce(tensor: Tensor, axis: Any) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size)]
        dist.all_gather(parts, tensor.contiguous(), group=axis.group)
        return sum(parts[-2::-1], parts[-1])

    with mock.patch.object(differentiable, "all_reduce", all_reduce):
        yield


@contextlib.contextmanager
def shard_sums_backwards() -> Iterator[None]:
    """Sums over dp_shard are added from the last rank to the first."""

    def sum_rows(chunk: Tensor, rows: Tensor, group: Any) -> None:
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows, group=group)
        parts = arrived.view(group.size(), -1)
        chunk.copy_(sum(parts.flip(0)[1:], parts[-1]))

    with mock.patch.object(gradient_sum, "sum_rows", sum_rows):
        yield


HARMLESS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "products_in_2_parts": products_in_2_parts,
    "products_in_8_parts": products_in_8_parts,
    "tp_sums_backwards": tp_sums_backwards,
    "shard_sums_backwards": shard_sums_backwards,
}
