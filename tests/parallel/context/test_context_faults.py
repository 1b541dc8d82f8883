"""Faults planted into cp are found by `verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from paceline.mesh import Axis
from paceline.parallel.context import apply, exchange
from paceline.parallel.dropout.replacements import Cut
from paceline.parallel.placement import Placement
from paceline.parallel.split import Split
from paceline.recipe import parse_recipe
from paceline.verifying.check import resolve_layout, verify_recipe
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner
from tests.verifying.test_faults import recipe_table


@contextlib.contextmanager
def weights_not_summed() -> Iterator[None]:
    """Each rank keeps the gradients that its own rows and heads give the weights."""
    with mock.patch.object(Placement, "add_up_partial", return_value=None):
        yield


@contextlib.contextmanager
def weights_summed_twice() -> Iterator[None]:
    right = Placement.add_up_partial

    def add_up(self: Placement, gradients: Any) -> None:
        right(self, gradients)
        right(self, gradients)

    with mock.patch.object(Placement, "add_up_partial", add_up):
        yield


@contextlib.contextmanager
def masks_from_position_zero() -> Iterator[None]:
    """Every rank drops what the first rank drops."""
    right = apply._RowsCut.__call__

    def cut(self: apply._RowsCut) -> Cut:
        found = right(self)
        assert found.rows is not None
        return replace(found, rows=(0, found.rows[1]))

    with mock.patch.object(apply._RowsCut, "__call__", cut):
        yield


@contextlib.contextmanager
def heads_in_another_order() -> Iterator[None]:
    """Behind attention, the heads are joined in another order than they were cut."""
    right = exchange._exchange_to_rows

    def back(tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis) -> Tensor:
        joined = right(tensor, dim, split, counts, axis)
        return joined.roll(joined.shape[split.dim] // axis.size, split.dim)

    with mock.patch.object(exchange, "_exchange_to_rows", back):
        yield


@contextlib.contextmanager
def rows_in_another_order() -> Iterator[None]:
    """Inside of attention, the ranks' rows are joined in another order."""
    right = exchange._exchange_to_heads

    def forth(tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis) -> Tensor:
        joined = right(tensor, dim, split, counts, axis)
        return joined.roll(counts[0], dim)

    with mock.patch.object(exchange, "_exchange_to_heads", forth):
        yield


@contextlib.contextmanager
def gradient_of_rows_lost() -> Iterator[None]:
    """Before the first block, each rank keeps the gradient of its own rows; the others' are zeros."""
    right = exchange._all_gather_rows

    def gather(tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
        joined = right(tensor, dim, counts, axis)
        joined.narrow(dim, 0, counts[0]).zero_()
        return joined

    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.given), None, None, None

    with mock.patch.object(exchange._DivideRows, "backward", staticmethod(backward)):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        weights_not_summed,
        weights_summed_twice,
        masks_from_position_zero,
        heads_in_another_order,
        rows_in_another_order,
        gradient_of_rows_lost,
    )
}


def planted(fault: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls `fn(*args)` while the library has a fault."""
    with FAULTS[fault]():
        return fn(*args)


class FaultyRunner(PoolRunner):
    """Plants one of `FAULTS` in worlds of several ranks."""

    def __init__(self, pool: Pool, planted_fault: str) -> None:
        super().__init__(pool)
        self._planted = planted_fault

    def __call__(self, fn: Callable[..., Any], nproc: int, args: tuple[Any, ...]) -> list[Any]:
        if nproc > 1:
            fn, args = planted, (self._planted, fn, args)
        return super().__call__(fn, nproc, args)


QUICK = {"weights_not_summed", "masks_from_position_zero"}


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_found(ranks: Pool, tmp_path: Path, fault: str) -> None:
    recipe = parse_recipe(recipe_table("gpt", tmp_path))
    run = FaultyRunner(ranks, fault)
    (result,) = verify_recipe(recipe, [resolve_layout("cp=2")], steps=1, run=run).results
    assert result.status == "differs", str(result)
    assert result.worst > 1e9, "faults are orders of magnitude beyond rounding"
