"""The sum over slots: independent of the cut over ranks and of the scale of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.codec import CODECS, WholeCodec
from paceline.comm.residuals import SUM, Residuals, RowRange
from paceline.comm.slots import SlotSum
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.parallel.sums.gradients import add_gradients
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
        slots = [[[gradient * grown for gradient in draw(step, slot)]] for slot in slot_sum.own]
        slot_sum.sum([pieces], slots, totals, 1 / grown)
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
        slots = [[draw(step, slot)] for slot in slot_sum.own]
        totals = [torch.empty(shape) for shape in SHAPES.values()]
        slot_sum.sum([pieces], slots, totals, 1.0)
        residuals.settle(keep=True)
        for number, total in enumerate(totals):
            sent[number] += total
            whole[number] += sum(gradients[0][number] for gradients in slots)
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


# By rank: its microbatches of two slots that two ranks share. A missing gradient is that of `None` in `draw`.
OWNED = {
    "even": (2, 2, 2, 2),
    "uneven": (3, 1, 1, 2),
    "a rank without any": (1, 0, 3, 2),
    "a slot": (0, 0, 2, 1),
}


def draw_microbatch(number: int) -> list[Tensor | None]:
    gradients: list[Tensor | None] = list(draw(7, number))
    if number % 2:
        gradients[1] = None  # "b"
    if number:
        gradients[3] = None  # "d": only the first microbatch has it, with a negative zero
    elif gradients[3] is not None:
        gradients[3][0] = -0.0
    return gradients


def add_microbatches(numbers: range, first: int, num_leaves: int) -> list[list[Tensor | None]]:
    tree = TreeSum(num_leaves, add_gradients)
    for number in numbers:
        tree.push((number - first, number - first + 1), draw_microbatch(number))
    return [gradients for _, gradients in tree.subtrees]


def sum_shared(
    world: Any, owned: tuple[int, ...], num_shards: int, kind: str, num_steps: int = 3
) -> tuple[list[tuple[int, RowRange, Tensor]], list[tuple[int, RowRange, Tensor]], int]:
    """Sum two slots, on one rank or shared by two ranks each; return sums, residuals, and the bytes sent."""
    group = dist.group.WORLD if world.world_size > 1 else None
    residuals = Residuals()
    codec = WholeCodec() if kind == "fp32" else CODECS[kind]
    slot_sum = SlotSum(codec, 2, residuals, group, num_shards)
    shards = []
    for shard in range(num_shards):
        cuts = {
            n: (shape[0] * shard // num_shards, shape[0] * (shard + 1) // num_shards)
            for n, shape in SHAPES.items()
        }
        shards.append([RowRange(n, *cuts[n], SHAPES[n][1]) for n in SHAPES if cuts[n][0] < cuts[n][1]])
    own = shards[world.rank % num_shards]
    totals = [torch.empty(piece.num_rows, piece.length) for piece in own]
    counts = (sum(owned[:2]), sum(owned[2:]))
    starts = [sum(owned[:rank]) for rank in range(4)]
    for step in range(num_steps):
        if group is None:
            blocks = [range(counts[0]), range(counts[0], sum(counts))]
            found = [add_microbatches(block, block.start, len(block)) for block in blocks]
            missing: list[Tensor | None] = [None] * len(SHAPES)
            given = [each[0] if each else missing for each in found]
            plan = None
        else:
            slot, rank = world.rank // 2, world.rank
            block = range(starts[rank], starts[rank] + owned[rank])
            given = add_microbatches(block, starts[2 * slot], counts[slot])
            plan = plan_reduction(owned[2 * slot : 2 * slot + 2])
        names = list(SHAPES)
        cut = [
            [
                [None if (g := each[names.index(p.name)]) is None else g[p.start : p.stop] for p in pieces]
                for pieces in shards
            ]
            for each in given
        ]
        slot_sum.sum(shards, cut, totals, 1.0, *([plan] if plan is not None else []))
        residuals.settle(keep=step != 1)
    kept = [(slot, piece, rows.clone()) for slot, piece, rows in residuals.list_kept()]
    sums = [(0, piece, total.clone()) for piece, total in zip(own, totals, strict=True)]
    return sums, kept, slot_sum.sent_bytes


def join(kept: list[tuple[int, RowRange, Tensor]]) -> dict[tuple[int, str], Tensor]:
    whole: dict[tuple[int, str], Tensor] = {}
    for slot, piece, rows in kept:
        target = whole.setdefault((slot, piece.name), torch.full(SHAPES[piece.name], torch.nan))
        target[piece.start : piece.stop] = rows
    return whole


@pytest.mark.parametrize("kind", ["int8", "bf16"])
@pytest.mark.parametrize("owned", OWNED.values(), ids=OWNED)
def test_ranks_that_share_a_slot_have_the_bits_of_one_rank(
    ranks: Pool, owned: tuple[int, ...], kind: str
) -> None:
    for num_shards, num_steps in ((1, 1), (1, 3), (2, 3), (4, 3)):  # after one step, zeros have signs
        [(expected, alone, _)] = ranks.run(sum_shared, nproc=1, args=(owned, 1, kind, num_steps))
        shared = ranks.run(sum_shared, nproc=4, args=(owned, num_shards, kind, num_steps))
        for rank in range(0, 4, num_shards):
            sums = join([entry for found, _, _ in shared[rank : rank + num_shards] for entry in found])
            for key, rows in join(expected).items():
                # As bits, because 0.0 equals -0.0.
                assert torch.equal(sums[key].view(torch.int32), rows.view(torch.int32)), key
        found = join([entry for _, kept, _ in shared for entry in kept])
        for key, rows in join(alone).items():
            assert torch.equal(found[key], rows), key


def test_ranks_that_share_a_slot_send_each_other_only_their_columns(ranks: Pool) -> None:
    num_bytes = 4 * sum(rows * length for rows, length in SHAPES.values())
    for _, _, sent_bytes in ranks.run(sum_shared, nproc=4, args=((2, 2, 2, 2), 1, "fp32")):
        # To the other rank of the slot half of the gradient, and two quarters of the sum. To the twin a
        # quarter of the slot, and of the sum. About that, because rows are not cut.
        assert sent_bytes == pytest.approx(3 * num_bytes * (1 / 2 + 2 / 4 + 1 / 4 + 1 / 4), rel=0.1)
