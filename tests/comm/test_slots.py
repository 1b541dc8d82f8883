"""The sum over slots: independent of the cut over ranks and of the scale of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.codec import CODECS
from paceline.comm.residuals import SUM, Residuals, RowRange
from paceline.comm.slots import SlotSum
from tests.dist.pool import Pool

SHAPES = {"a": (7, 300), "b": (1, 5), "c": (64, 40), "d": (3, 1)}
NUM_SLOTS = 4


def draw(step: int, slot: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + slot)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def take_steps(
    group: dist.ProcessGroup | None, scale: float = 1.0, num_steps: int = 3
) -> tuple[list[Tensor], Residuals]:
    """Sum the gradients of some steps, of which the last but one is skipped."""
    residuals = Residuals()
    slot_sum = SlotSum(CODECS["int8"], NUM_SLOTS, residuals, group)
    pieces = [RowRange(name, 0, *shape) for name, shape in SHAPES.items()]
    totals = [torch.empty(shape) for shape in SHAPES.values()]
    for step in range(num_steps):
        grown = scale ** (step + 1)  # changes from step to step, as a loss scale does
        slots = [[gradient * grown for gradient in draw(step, slot)] for slot in slot_sum.own]
        slot_sum.sum(pieces, slots, totals, 1 / grown)
        residuals.settle(keep=step != num_steps - 2)
    return [total / grown for total in totals], residuals


def sum_on_ranks(world: Any) -> list[Tensor]:
    return take_steps(dist.group.WORLD)[0]


def test_the_same_bits_on_any_number_of_ranks(ranks: Pool) -> None:
    expected, _ = take_steps(None)
    for nproc in (2, 4):
        for totals in ranks.run(sum_on_ranks, nproc=nproc):
            assert all(map(torch.equal, totals, expected))


def test_sums_and_residuals_do_not_depend_on_the_scale() -> None:
    expected, residuals = take_steps(None)
    totals, scaled = take_steps(None, scale=2.0**11)
    assert all(map(torch.equal, totals, expected))
    for (*key, one), (*other_key, other) in zip(residuals.list_kept(), scaled.list_kept(), strict=True):
        assert key == other_key
        assert torch.equal(one, other)


def test_nothing_is_lost_but_the_residuals() -> None:
    residuals = Residuals()
    slot_sum = SlotSum(CODECS["int8"], NUM_SLOTS, residuals, None)
    pieces = [RowRange(name, 0, *shape) for name, shape in SHAPES.items()]
    sent = [torch.zeros(shape) for shape in SHAPES.values()]
    whole = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in range(5):
        slots = [draw(step, slot) for slot in slot_sum.own]
        totals = [torch.empty(shape) for shape in SHAPES.values()]
        slot_sum.sum(pieces, slots, totals, 1.0)
        residuals.settle(keep=True)
        for number, total in enumerate(totals):
            sent[number] += total
            whole[number] += sum(gradients[number] for gradients in slots)
    left = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _, piece, rows in residuals.list_kept():
        left[piece.name] += rows
    for number, name in enumerate(SHAPES):
        assert torch.allclose(sent[number] + left[name], whole[number], atol=2e-5)
    assert left["a"].any()


def test_the_sum_has_a_residual_of_its_own() -> None:
    _, residuals = take_steps(None)
    slots = {slot for slot, _, _ in residuals.list_kept()}
    assert slots == {SUM, *range(NUM_SLOTS)}
