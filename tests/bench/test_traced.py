"""Costs of any module by a trace, against the arithmetic of recipes and what autograd really keeps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.bench.traced import plan_module, trace_costs
from paceline.errors import PacelineError
from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.models.resnet import Resnet
from paceline.plan.cluster import read_cluster
from paceline.plan.costs import ModelCosts
from paceline.plan.demand import Demands
from paceline.plan.fit import load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.search import search
from paceline.recipe import Layout, Recipe, parse_recipe
from paceline.recipe.schema import EncoderModel, GptModel, ResnetModel

SAMPLES, TOKENS, VOCAB = 3, 40, 256
SIZES = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn_hidden": 80}


def make_recipe(dtype: str = "fp32") -> Recipe:
    model = {"kind": "gpt", **SIZES}
    data = {"kind": "text", "seq_len": TOKENS}
    train = {"steps": 1, "global_batch_size": 2 * SAMPLES, "microbatch_size": SAMPLES, "dtype": dtype}
    return parse_recipe({"model": model, "data": data, "train": train})


def make_gpt() -> Gpt:
    return Gpt(GptModel(kind="gpt", **SIZES), VOCAB, TOKENS)


def trace(model: nn.Module) -> ModelCosts:
    return trace_costs(model, torch.zeros(SAMPLES, TOKENS, dtype=torch.long), SAMPLES, 2 * SAMPLES)[0]


def measure_kept(model: nn.Module, dtype: str) -> int:
    """Return the bytes that autograd really keeps in all blocks."""
    outside = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    seen: dict[int, Tensor] = {}
    others: list[Tensor] = []
    is_inside = [False]
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    weights |= {(b, a) for a, b in weights}

    def pack(tensor: Tensor) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        # Narrow copies of weights are counted apart.
        is_copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in weights
        if is_inside[0] and pointer not in outside and not is_copy:
            # Without its graph: a graph that holds its own outputs is never collected.
            seen[pointer] = tensor.detach()
        others.append(tensor.detach())  # so that no other gets its memory

    for block in model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda *_: is_inside.__setitem__(0, True))
        block.register_forward_hook(lambda *_: is_inside.__setitem__(0, False))
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        kept = model(ids)
    assert kept.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_keep_what_autograd_keeps(dtype: str) -> None:
    counted = sum(part.kept.divide(1, sequence=False) for part in of_recipe(make_recipe(dtype)).blocks)
    assert SAMPLES * counted == pytest.approx(measure_kept(make_gpt(), dtype), rel=0.02)


def test_a_trace_finds_the_costs_of_the_arithmetic() -> None:
    traced, counted = trace(make_gpt()), of_recipe(make_recipe())
    assert traced.num_parameters == counted.num_parameters == sum(p.numel() for p in make_gpt().parameters())
    assert len(traced.blocks) == len(counted.blocks) == 3
    assert traced.tokens == TOKENS
    for mine, other in zip(traced.parts, counted.parts, strict=True):
        flops = [sum(p.flops / p.share for p in part.products) for part in (mine, other)]
        assert flops[0] == pytest.approx(flops[1])
        by = [sorted(p.by for p in part.products if not p.is_attention) for part in (mine, other)]
        assert set(by[0]) == set(by[1])
    for mine, other in zip(traced.blocks, counted.blocks, strict=True):
        kept = [part.kept.divide(1, sequence=False) for part in (mine, other)]
        assert kept[0] == pytest.approx(kept[1], rel=0.02)
        halves = [part.kept.divide(2, sequence=True) for part in (mine, other)]
        assert halves[0] == pytest.approx(halves[1], rel=0.02)
        assert mine.key_bytes == pytest.approx(other.key_bytes)
        assert 0.3 < (mine.moved + mine.moved_whole) / (other.moved + other.moved_whole) < 3


def test_other_recipes_keep_what_a_trace_keeps() -> None:
    text = {"kind": "masked_text", "seq_len": TOKENS}
    train = {"steps": 1, "global_batch_size": 4, "microbatch_size": 2}
    encoder = {"kind": "encoder", "layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 112, "dropout": 0.0}
    resnet = {"kind": "resnet", "blocks": [2, 2], "width": 6}
    cases: list[tuple[Any, Any, nn.Module, Tensor]] = [
        (
            encoder,
            text,
            Encoder(EncoderModel(**encoder), 257, TOKENS),
            torch.zeros(2, TOKENS, dtype=torch.long),
        ),
        (resnet, {"kind": "digits"}, Resnet(ResnetModel(**resnet), 1, 10), torch.zeros(2, 1, 8, 8)),
    ]
    for section, data, model, example in cases:
        recipe = parse_recipe({"model": section, "data": data, "train": train})
        counted, (traced, _) = of_recipe(recipe), trace_costs(model, example, 2, 4)
        assert counted.num_parameters == traced.num_parameters
        for mine, other in zip(traced.blocks, counted.blocks, strict=True):
            flops = [sum(p.flops / p.share for p in part.products) for part in (mine, other)]
            assert flops[0] == pytest.approx(flops[1], rel=0.02)
            kept = [part.kept.divide(1, sequence=False) for part in (mine, other)]
            # A block that halves the image also keeps its narrower input.
            assert kept[0] == pytest.approx(kept[1], rel=0.03 if section is encoder else 0.25)


def test_frozen_parameters_have_no_gradient_no_moments_and_no_product_of_their_own() -> None:
    model = make_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    frozen, whole = trace(model), trace(make_gpt())
    assert frozen.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not any(p.learns for p in frozen.blocks[0].products if not p.is_attention)
    cluster = read_cluster("2 H100-80", load_constants().links)
    layout = Layout(dp_replicate=2)
    state = [Demands(costs, cluster).count(layout).terms for costs in (frozen, whole)]
    assert state[0].get("optimizer", 0) < 0.05 * state[1]["optimizer"]
    held = sum(p.numel() for p in model.parameters() if not p.requires_grad) * 4
    assert state[0]["frozen"] == pytest.approx(held, rel=0.05)  # and the buffers
    halves = Demands(frozen, cluster).count(Layout(dp_replicate=1, tp=2)).terms
    assert halves["frozen"] == pytest.approx(held / 2, rel=0.05)


def test_tied_weights_count_once() -> None:
    tied, apart = make_gpt(), Gpt(GptModel(kind="gpt", tie_embeddings=False, **SIZES), VOCAB, TOKENS)
    assert trace(apart).num_parameters - trace(tied).num_parameters == VOCAB * SIZES["hidden"]


class Conv(nn.Module):
    """A model without blocks, attention or text."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def test_a_model_without_blocks_is_planned_with_what_is_legal_for_it() -> None:
    costs, rules = trace_costs(Conv(), torch.zeros(2, 3, 16, 16), 2, 8)
    flops = sum(product.flops for part in costs.parts for product in part.products)
    assert flops == pytest.approx(2 * (16 * 16 * 27 * 8 + 8 * 4))
    found = search(costs, rules, read_cluster("4 H100-80", load_constants().links), load_constants())
    assert found.fitting
    axes = {axis for candidate in found.fitting for axis in candidate.family.split()}
    assert axes == {"dp_replicate", "dp_shard", "tp"}  # no blocks for pp, no sequence for cp


class Looks(nn.Module):
    """A model whose forward depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_forward_that_looks_at_values_is_refused() -> None:
    with pytest.raises(PacelineError) as found:
        trace_costs(Looks(), torch.zeros(2, 4), 2, 4)
    assert found.value.code == "PL938"
    assert "Looks" in str(found.value)


class Ends(Looks):
    """A model whose forward ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        sys.exit("no data")


def test_a_forward_that_ends_the_process_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"calls sys\.exit") as found:
        trace_costs(Ends(), torch.zeros(2, 4), 2, 4)
    assert found.value.code == "PL938"


def make_nothing() -> Any:
    raise ValueError("no")


def make_an_end() -> Any:
    sys.exit(3)


def test_a_function_that_ends_the_process_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"make_an_end.*sys\.exit\(3\)") as found:
        plan_module(f"{__name__}:make_an_end", f"{__name__}:make_nothing", 0, 1)
    assert found.value.code == "PL934"


@pytest.mark.parametrize("target", ["no_such_module:build", "math:no_such_name", "math:pi", "math"])
def test_a_function_that_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(PacelineError) as found:
        plan_module(target, target, 0, 1)
    assert found.value.code == "PL934"
