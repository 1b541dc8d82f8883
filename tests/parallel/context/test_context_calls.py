"""cp by gather for any call of attention, and `cp_by = "auto"`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.context.gather import attend_by_rows
from paceline.parallel.context.row_exchange import Rows
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import Rules
from paceline.torch_seams.operators import ATTENTION
from tests.dist.pool import Pool
from tests.parallel.context.test_context_gather import _with, run_example
from tests.parallel.context.test_context_refusals import RECIPE
from tests.parallel.context.test_context_traffic import LENGTH
from tests.parallel.tensor.models import build

NUM_HEADS, WIDTH = 4, 8
# Parts of unequal length; and 2 x 2, 2 x 3 or 2 x 4 chunks of equal length.
UNEVEN, EVEN = 21, 48


def _draw_call(name: str, dtype: torch.dtype, length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Queries, keys and values of a whole sequence, and the other arguments of a call."""
    generator = torch.Generator().manual_seed(0)
    heads = 2 if name == "shared heads" else NUM_HEADS
    shapes = [(2, h, length, WIDTH) for h in (NUM_HEADS, heads, heads)]
    if name == "wide values":
        shapes[2] = (2, heads, length, 2 * WIDTH)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    position = torch.arange(length)
    given: dict[str, Any] = {
        "causal": {"is_causal": True},
        "shared heads": {"is_causal": True, "enable_gqa": True},
        "wide values": {"is_causal": True},
        "window": {"attn_mask": (position[:, None] - position).abs() < 3},  # whole parts are masked
        # One position attends to nothing.
        "nothing": {"attn_mask": (position[:, None] >= position) & (position[:, None] != 8)},
        "bias": {"attn_mask": torch.randn(2, 1, length, length, generator=generator).to(dtype), "scale": 0.3},
        "keys alone": {"attn_mask": (position < 13)[None, None, None, :]},
        "columns alike": {"attn_mask": torch.randn(length, 1, generator=generator).to(dtype)},
    }.get(name, {})
    return tensors, given


CALLS = ["plain", "causal", "shared heads", "wide values", "window", "nothing", "bias", "keys alone"]


def attend(world: Any, cases: list[tuple[str, torch.dtype]], length: int) -> dict[str, float]:
    """Return by call the largest difference of the result or a gradient from one process."""
    torch.set_num_threads(1)
    rows = Rows(build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp, is_causal=length != UNEVEN)
    rows.divide(length)
    assert rows.division.is_zigzag == (length != UNEVEN)
    found = {}
    for name, dtype in cases:
        tensors, given = _draw_call(name, dtype, length)
        whole = [tensor.clone().requires_grad_() for tensor in tensors]
        expected = F.scaled_dot_product_attention(*whole, **given)
        weight = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view(expected.shape)
        (expected * weight).sum().backward()
        parts = [rows.take(tensor, 2).clone().requires_grad_() for tensor in tensors]
        change = attend_by_rows(rows, gathers=True, is_causal=given.get("is_causal", False))
        result = change(ATTENTION, tuple(parts), given, ATTENTION)
        (result * rows.take(weight, 2)).sum().backward()
        pairs = [(expected.detach(), result.detach())]
        pairs += [(one.grad, part.grad) for one, part in zip(whole, parts, strict=True)]  # type: ignore[misc]
        found[f"{name} {dtype}"] = max(
            float((rows.take(one, 2) - part).abs().max() / one.abs().max()) for one, part in pairs
        )
    return found


@pytest.mark.parametrize(("num_ranks", "length"), [(2, UNEVEN), (4, UNEVEN), (2, EVEN), (3, EVEN), (4, EVEN)])
def test_any_call_is_that_of_one_process(ranks: Pool, num_ranks: int, length: int) -> None:
    """In zigzag and not."""
    cases = [(name, torch.float64) for name in [*CALLS, "columns alike"]] + [("causal", torch.float32)]
    for found in ranks.run(attend, nproc=num_ranks, args=(cases, length)):
        limits = {name: 1e-12 if "float64" in name else 1e-5 for name in found}
        assert all(found[name] < limit for name, limit in limits.items()), found
        assert not any(math.isnan(value) for value in found.values()), found


@pytest.mark.parametrize(("name", "num_ranks", "by"), [("gpt", 2, "heads"), ("gpt-grouped", 4, "gather")])
def test_auto_takes_heads_where_they_divide(name: str, num_ranks: int, by: str) -> None:
    plan = find_context_plan(build(name), run_example(name), num_ranks, by="auto")
    assert plan.by == by
    assert bool(plan.crossings) == (by == "heads")


def test_auto_names_what_neither_way_divides() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.roll(1, 1)

    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PacelineError) as caught:
        find_context_plan(_with(Shift), lambda m: m(ids), 2, by="auto")
    assert caught.value.code == "PL630"
    assert "roll in blocks.0.attend" in str(caught.value)


@pytest.mark.parametrize("by", ["gather", "auto"])
def test_layouts_without_whole_heads_are_legal(by: str) -> None:
    layout = Layout.parse(f"cp=4 cp_by={by}")
    assert not Rules.of(parse_recipe(RECIPE)).check(layout.close(), 4)
    assert parse_recipe({**RECIPE, "layout": {"cp": 4, "cp_by": by}}).layout.to_layout().cp_by == by
