"""cp by ring: keys and values go round, and results are merged to those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.exchange import Rows
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.context.gather import attend_by_rows
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.collectives import all_reduce
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import check_layout
from paceline.recipe.schema import GptModel
from paceline.torch_seams.operators import ATTENTION
from tests.dist.pool import Pool
from tests.parallel.context.test_context_gather import Eager, _with, loss_of, read_packed, run_example
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


def attend(
    world: Any, cases: list[tuple[str, torch.dtype]], length: int, by: str = "ring"
) -> dict[str, float]:
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
        change = attend_by_rows(rows, gathers=True, is_causal=given.get("is_causal", False), by=by)
        result = change(ATTENTION, tuple(parts), given, ATTENTION)
        (result * rows.take(weight, 2)).sum().backward()
        pairs = [(expected.detach(), result.detach())]
        pairs += [(one.grad, part.grad) for one, part in zip(whole, parts, strict=True)]  # type: ignore[misc]
        found[f"{name} {dtype}"] = max(
            float((rows.take(one, 2) - part).abs().max() / one.abs().max()) for one, part in pairs
        )
    return found


@pytest.mark.parametrize("by", ["gather", "ring"])
@pytest.mark.parametrize(("num_ranks", "length"), [(2, UNEVEN), (4, UNEVEN), (2, EVEN), (3, EVEN), (4, EVEN)])
def test_any_call_is_that_of_one_process(ranks: Pool, num_ranks: int, length: int, by: str) -> None:
    """In zigzag and not."""
    cases = [(name, torch.float64) for name in [*CALLS, "columns alike"]] + [("causal", torch.float32)]
    for found in ranks.run(attend, nproc=num_ranks, args=(cases, length, by)):
        limits = {name: 1e-12 if "float64" in name else 1e-5 for name in found}
        assert all(found[name] < limit for name, limit in limits.items()), found
        assert not any(math.isnan(value) for value in found.values()), found


def compare(world: Any, names: list[str]) -> dict[str, float]:
    """Return by model the largest difference of its loss or a gradient, in parts of the largest."""
    torch.set_num_threads(1)
    axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
    found = {}
    for name in names:
        reference, model = build(name), build(name)
        for each in (reference, model):
            open_attention(each)
        expected = loss_of(name, reference)
        expected.backward()
        plan = find_context_plan(model, run_example(name), world.world_size, by="ring")
        assert "in a ring" in plan.describe()
        apply_context(model, plan, axis)
        loss = loss_of(name, model)
        loss.backward()
        scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        worst = abs(float(loss.detach() / expected.detach()) - 1)
        for (key, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
            if whole.grad is not None and part.grad is not None:
                grad = all_reduce(part.grad, axis) if key in plan.partial else part.grad
                worst = max(worst, float((grad - whole.grad).abs().max()) / scale)
        found[name] = worst
    return found


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["gpt-grouped", "llama"]),
        pytest.param(
            4,
            ["gpt", "lora", "encoder", "llama", "gpt2", "bert", "transformer", "vit"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_as_in_one_process(ranks: Pool, num_ranks: int, names: list[str]) -> None:
    for found in ranks.run(compare, nproc=num_ranks, args=(names,)):
        assert max(found.values()) < 1e-11, found


def test_documents_packed_for_a_llama_do_not_see_each_other(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    (((expected, _),),) = ranks.run(read_packed, nproc=1, args=([""],))
    for found in ranks.run(read_packed, nproc=2, args=(["ring"],)):
        for before, after in found:
            assert torch.allclose(before, expected, rtol=1e-12, atol=1e-13)
            same = (before == after).all(-1).all(0)
            assert same.tolist() == [not 9 <= position < 14 for position in range(LENGTH)]


LAYERS, HIDDEN, HEADS, KV_HEADS, SAMPLES = 3, 32, 4, 1, 4


def count(world: Any) -> dict[str, tuple[int, int]]:
    """Count messages and bytes that this rank sends to the next one, in forward and in backward."""
    torch.manual_seed(0)
    section = GptModel(kind="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS)
    model, n = Gpt(section, 50, LENGTH), world.world_size
    ids = torch.randint(0, 50, (SAMPLES, LENGTH))
    axis = build_mesh(Layout.parse(f"cp={n}"), world).cp
    apply_context(model, find_context_plan(model, lambda m: m(ids[:2]), n, by="ring"), axis)
    sent: dict[str, list[int]] = {"forward": [], "backward": []}
    phase, send = "forward", dist.batch_isend_irecv

    def batch_isend_irecv(operations: Any) -> Any:
        sent[phase] += [op.tensor.nbytes for op in operations if op.op is dist.isend]
        return send(operations)

    dist.batch_isend_irecv = batch_isend_irecv
    try:
        loss = model(ids).sum()
        phase = "backward"
        loss.backward()
    finally:
        dist.batch_isend_irecv = send
    return {key: (len(sizes), sum(sizes)) for key, sizes in sent.items()}


def test_bytes_are_those_of_the_formula(ranks: Pool) -> None:
    """n - 1 messages per attention in forward; in backward keys and values, and their gradients."""
    n, keys = 4, 4 * SAMPLES * LENGTH * HIDDEN * KV_HEADS // HEADS
    per_pass = LAYERS * (n - 1) * 2 * keys // n
    for sent in ranks.run(count, nproc=n):
        assert sent == {
            "forward": (LAYERS * (n - 1), per_pass),
            "backward": (2 * LAYERS * (n - 1), 2 * per_pass),
        }


def test_a_ring_refuses_attention_that_is_not_torchs() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PacelineError) as caught:
        find_context_plan(_with(Eager), lambda m: m(ids), 2, by="ring")
    assert caught.value.code == "PL634"
    assert 'layout.cp_by="ring": bmm in blocks.0.attend combines positions' in str(caught.value)


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


@pytest.mark.parametrize("by", ["ring", "auto"])
def test_layouts_without_whole_heads_are_legal(by: str) -> None:
    layout = Layout.parse(f"cp=4 cp_by={by}")
    assert not check_layout(parse_recipe(RECIPE), layout.close(), 4)
    assert parse_recipe({**RECIPE, "layout": {"cp": 4, "cp_by": by}}).layout.to_layout().cp_by == by
