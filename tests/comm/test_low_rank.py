"""The sum of thin matrices: independent of the cut over ranks, and nothing is lost but the residuals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange
from paceline.comm.low_rank import LowRankSum, is_low_rank
from paceline.comm.residuals import BASIS, Residuals, RowRange
from tests.dist.pool import Pool

SHAPES = {"a": (40, 300), "b": (1, 5), "c": (64, 40), "d": (3, 1)}
PIECES = [RowRange(name, 0, *shape) for name, shape in SHAPES.items()]
NUM_SLOTS, LOW_RANK, NUM_STEPS = 4, 4, 4


def draw(step: int, slot: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + slot)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def build(residuals: Residuals, group: dist.ProcessGroup | None = None) -> LowRankSum:
    exchange = None if group is None else Exchange(group)
    return LowRankSum(LOW_RANK, NUM_SLOTS, residuals, exchange, group)


def take_steps(
    group: dist.ProcessGroup | None, scale: float = 1.0, num_steps: int = NUM_STEPS
) -> tuple[list[Tensor], Residuals]:
    """Sum the gradients of some steps, of which the last but one is skipped."""
    residuals = Residuals()
    low_rank_sum = build(residuals, group)
    totals = sum_steps(low_rank_sum, residuals, scale, num_steps)
    return totals, residuals


def sum_steps(low_rank_sum: LowRankSum, residuals: Residuals, scale: float, num_steps: int) -> list[Tensor]:
    totals = [torch.empty(shape) for shape in SHAPES.values()]
    for step in range(num_steps):
        grown = scale ** (step + 1)  # changes from step to step, as a loss scale does
        slots = [[[gradient * grown for gradient in draw(step, slot)]] for slot in low_rank_sum.own]
        if step == num_steps - 2:
            slots[0][0][0][0, 0] = torch.inf
        low_rank_sum.sum([PIECES], slots, totals, 1 / grown)
        assert totals[0].isnan().any() == (step == num_steps - 2) or low_rank_sum.own.start
        residuals.settle(keep=step != num_steps - 2)
    return [total / grown for total in totals]


def sum_on_ranks(world: Any) -> tuple[list[Tensor], int]:
    residuals = Residuals()
    low_rank_sum = build(residuals, dist.group.WORLD)
    return sum_steps(low_rank_sum, residuals, 1.0, NUM_STEPS), low_rank_sum.sent_bytes


def test_the_same_bits_on_any_number_of_ranks(ranks: Pool) -> None:
    expected, _ = take_steps(None)
    for nproc in (2, 4):
        for totals, sent_bytes in ranks.run(sum_on_ranks, nproc=nproc):
            assert all(map(torch.equal, totals, expected))
            # Small vectors travel whole: P with b and d as they are, then Q; one of each per step.
            num_numbers = LOW_RANK * (40 + 64) + 5 + 3 + LOW_RANK * (300 + 40)
            assert sent_bytes == NUM_STEPS * (nproc - 1) * 4 * num_numbers


def test_sums_and_residuals_do_not_depend_on_the_scale() -> None:
    expected, residuals = take_steps(None)
    totals, scaled = take_steps(None, scale=2.0**11)
    assert all(map(torch.equal, totals, expected))
    for (*key, one), (*other_key, other) in zip(residuals.list_kept(), scaled.list_kept(), strict=True):
        assert key == other_key
        assert torch.equal(one, other)


def test_nothing_is_lost_but_the_residuals() -> None:
    residuals = Residuals()
    low_rank_sum = build(residuals)
    sent = [torch.zeros(shape) for shape in SHAPES.values()]
    whole = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in range(5):
        slots = [[draw(step, slot)] for slot in low_rank_sum.own]
        totals = [torch.empty(shape) for shape in SHAPES.values()]
        low_rank_sum.sum([PIECES], slots, totals, 1.0)
        residuals.settle(keep=True)
        for number, total in enumerate(totals):
            sent[number] += total
            whole[number] += sum(gradients[0][number] for gradients in slots)
    left = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for slot, piece, rows in residuals.list_kept():
        if slot != BASIS:
            left[piece.name] += rows
    for number, name in enumerate(SHAPES):
        assert torch.allclose(sent[number] + left[name], whole[number], atol=1e-4)
        assert left[name].any() == is_low_rank(*SHAPES[name], LOW_RANK)


def test_a_gradient_of_that_rank_is_sent_whole() -> None:
    """A rank that grows later finds a direction of its own: a column of zeros does not stay one."""
    low_rank_sum = build(Residuals())
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(LOW_RANK, 300, generator=generator)
    for columns in (0, 1, LOW_RANK):
        left = torch.randn(40, LOW_RANK, generator=generator)
        left[:, columns:] = 0.0
        gradient = left @ basis
        for _ in range(3):  # the residual is what the first of them left
            total = torch.empty(40, 300)
            low_rank_sum.sum([PIECES[:1]], [[[gradient / NUM_SLOTS]]] * NUM_SLOTS, [total], 1.0)
            low_rank_sum._residuals.settle(keep=True)
        assert torch.allclose(total, gradient, atol=1e-3)
