"""Zigzag: each rank of cp has two chunks of a sequence, and attends with each to the keys up to its end."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.division import Division
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.context.gather import attend_by_rows
from paceline.parallel.context.row_exchange import Rows
from paceline.parallel.dropout.masks import Cut, draw_mask, place_samples
from paceline.recipe import Layout
from paceline.recipe.schema import GptModel
from paceline.torch_seams.operators import ATTENTION
from paceline.verifying.parts import Place, find_part
from tests.dist.pool import Pool
from tests.parallel.context.test_context_gather import _with
from tests.parallel.context.test_context_traffic import Packed


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_chunks_are_balanced_and_joined_in_order(num_ranks: int) -> None:
    division = Division.of(24, num_ranks, zigzag=True)
    whole = torch.arange(48).view(2, 24)
    parts = [division.take(whole, 1, rank) for rank in range(num_ranks)]
    assert torch.equal(division.join(parts, 1), whole)
    positions = [division.list_positions(rank) for rank in range(num_ranks)]
    assert all(torch.equal(part[0], own) for part, own in zip(parts, positions, strict=True))
    # A position attends to as many keys as its number, and one more.
    assert len({int((own + 1).sum()) for own in positions}) == 1


def test_dropout_follows_the_positions() -> None:
    division, size, device = Division.of(24, 3, zigzag=True), [4, 24, 6], torch.device("cpu")

    def draw(size: list[int], *cuts: Cut) -> Tensor:
        place = place_samples(size, 4, cuts)
        return draw_mask(1, "layers.0/dropout#0", range(4), size, 0.3, device, place=place, cuts=cuts)

    parts = [draw([4, 8, 6], Cut(1, 1, 3, rank, division.list_runs(rank), 24)) for rank in range(3)]
    assert torch.equal(division.join(parts, 1), draw(size))


@pytest.mark.parametrize("rank", [0, 1])
def test_verify_knows_which_part_a_rank_has(rank: int) -> None:
    whole = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    places = [Place("cp", 2, rank)]
    part = Division.of(16, 2, zigzag=True).take(whole, 1, rank)
    part[:, -1] += 1e-3
    expected = find_part(whole, part, places)
    assert expected is not None
    assert (expected != part).any(dim=2).any(dim=0).nonzero().tolist() == [[part.shape[1] - 1]]


def test_lengths_without_equal_chunks_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    axis = mock.Mock(size=4, rank=1)
    causal, other = Rows(axis, is_causal=True), Rows(axis)
    with caplog.at_level(logging.INFO):
        for length in (24, 21, 20):
            causal.divide(length)
            other.divide(length)
            assert causal.division.is_zigzag == (length == 24)
            assert not other.division.is_zigzag
    (line,) = caplog.messages
    assert "zigzag is off for sequences of 21 positions, because 2 x cp = 8 does not divide them" in line


def _lay_out(query: Tensor) -> Tensor:
    """Return queries with positions before heads in memory, as projections return them."""
    return query.transpose(1, 2).contiguous().transpose(1, 2)


def attend_long(world: Any, length: int, width: int, kv_heads: int) -> tuple[bool, bool, list[list[int]]]:
    """Return whether a causal result has the bits and the strides of one process's, and each call's keys."""
    torch.set_num_threads(1)
    rows = Rows(build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp, is_causal=True)
    rows.divide(length)
    generator, same, alike, keys = torch.Generator().manual_seed(0), True, True, []
    for dtype in (torch.float32, torch.float64):
        shapes = [(1, heads, length, wide) for heads, wide in ((2, 16), (kv_heads, 16), (kv_heads, width))]
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        tensors[0] = _lay_out(tensors[0])
        given = {"is_causal": True, "enable_gqa": kv_heads == 1}
        expected = F.scaled_dot_product_attention(*tensors, **given)  # type: ignore[arg-type]
        seen: list[int] = []

        def run(query: Tensor, key: Tensor, *rest: Any, seen: list[int] = seen, **named: Any) -> Tensor:
            seen.append(key.shape[2])
            return ATTENTION(query, key, *rest, **named)

        query, *others = (rows.take(tensor, 2) for tensor in tensors)
        parts = (_lay_out(query), *others)
        result = attend_by_rows(rows, gathers=True, is_causal=True)(ATTENTION, parts, given, run)
        same &= torch.equal(result, rows.take(expected, 2))
        keys.append(seen)
        alike &= result.transpose(1, 2).is_contiguous() == expected.transpose(1, 2).is_contiguous()
    return same, alike, keys


@pytest.mark.parametrize(
    ("num_ranks", "length", "width", "kv_heads", "keys"),
    [
        (2, 2048, 16, 2, [[512, 2048], [1024, 1536]]),
        (2, 2048, 16, 1, [[512, 2048], [1024, 1536]]),
        (4, 1600, 16, 2, [[512, 1600], [512, 1536], [1024, 1536], [1024, 1024]]),
        # Chunks of 130 rows would have other bits, and so would values of another width with fewer keys.
        (4, 1040, 16, 2, [[1040]] * 4),
        (2, 2048, 8, 2, [[2048]] * 2),
    ],
)
def test_hidden_keys_are_skipped_and_every_bit_is_kept(
    ranks: Pool, num_ranks: int, length: int, width: int, kv_heads: int, keys: list[list[int]]
) -> None:
    found = ranks.run(attend_long, nproc=num_ranks, args=(length, width, kv_heads))
    assert [seen for _, _, seen in found] == [[own, own] for own in keys]
    assert all(same and alike for same, alike, _ in found), found


class Causal(Packed):
    """Causal attention, whose result is viewed as one process may view it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).view(batch, length, 32))
        return result


def mix(world: Any, by: str, length: int) -> list[tuple[bool, bool]]:
    """Compare blocks of causal attention, and others of masks within documents, with one process."""
    torch.set_num_threads(1)
    found = []
    axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
    for kinds in ([Causal, Packed], [Packed, Packed]):
        ids = torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(0))
        whole, model = _with(Packed).double(), _with(Packed).double()
        for each in (whole, model):
            torch.manual_seed(1)
            for block, kind in zip(each.blocks, kinds, strict=True):
                block.attend = kind().double()
        expected = whole(ids)
        plan = find_context_plan(model, lambda m, ids=ids: m(ids), world.world_size, by=by)  # type: ignore[misc]
        assert ("in zigzag" in plan.describe()) == (Causal in kinds)
        (rows,) = apply_context(model, plan, axis)
        result = model(ids)
        assert rows.division.is_zigzag == (Causal in kinds)
        found.append((torch.equal(result, expected), torch.allclose(result, expected, 1e-12, 1e-13)))
    return found


def test_masks_work_beside_causal_attention(ranks: Pool) -> None:
    for found in ranks.run(mix, nproc=2, args=("gather", 1024)):
        assert all(same and close for same, close in found), found


def train_long(world: Any, by: str) -> dict[str, Tensor]:
    """Return a GPT's loss for 1,024 positions and its gradients, summed over the ranks by hand."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Gpt(GptModel(kind="gpt", layers=2, hidden=16, heads=2, kv_heads=1), 50, 1024).double()
    ids = torch.randint(0, 50, (1, 1024))
    partial: set[str] = set()
    if by:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        plan = find_context_plan(model, lambda m: m(ids[:, :64]), world.world_size, by=by)
        (rows,) = apply_context(model, plan, axis)
        partial = plan.partial
    loss = (model(ids) ** 2).mean()
    loss.backward()
    if by:
        assert rows.division.is_zigzag
    for name, parameter in model.named_parameters():
        if name in partial:
            torch.distributed.all_reduce(parameter.grad)
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}  # type: ignore[dict-item]


def test_a_long_sequence_trains_as_in_one_process(ranks: Pool) -> None:
    (expected,) = ranks.run(train_long, nproc=1, args=("",))
    for found in ranks.run(train_long, nproc=2, args=("gather",)):
        assert torch.equal(found["loss"], expected["loss"])
        for name, tensor in expected.items():
            assert float((found[name] - tensor).abs().max() / tensor.abs().max()) < 1e-11, name
