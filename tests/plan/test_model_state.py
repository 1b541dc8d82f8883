"""Predicted memory and traffic agree with the papers, with a table of known models and with built models."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.gpt import Gpt
from paceline.plan.costs import ModelCosts, ModelPart, Product
from paceline.plan.model_state import Instant, Sizes, plan_memory, plan_recipe_memory
from paceline.plan.parameters import Parameter, count_parameters, list_parameters
from paceline.plan.step import cut_stages
from paceline.plan.traffic import count_sent
from paceline.recipe import Layout, load_recipe, parse_recipe

DOCS = Path(__file__).parent.parent.parent / "docs"
RECIPES = DOCS.parent / "recipes"
GB = 10**9
ONE = [Parameter("all", (7 * GB,))]
# Two blocks and what is outside of them; every number of rows is a multiple of 8.
BLOCKS = [
    Parameter("tokens", (512, 64), tp_dim=0),
    *(Parameter(f"{block}.in", (256, 64), block, 0) for block in ("0", "1")),
    *(Parameter(f"{block}.out", (64, 256), block, 1) for block in ("0", "1")),
    Parameter("norm", (64,)),
]
P = 4 * count_parameters(BLOCKS)
ROOT = 4 * (512 * 64 + 64)


def load_generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("num_ranks", "total"), [(1, 112), (4, 28), (8, 14)])
def test_seven_billion_parameters(num_ranks: int, total: int) -> None:
    plan = plan_memory(ONE, Layout(1, num_ranks))["after_backward"]
    assert plan.total == total * GB
    assert (plan.parameters, plan.gradients, plan.optimizer) == (
        total * GB / 4,
        total * GB / 4,
        total * GB / 2,
    )


def test_a_model_of_seven_billion_parameters() -> None:
    """The seeds' table for a model that can be built: LLaMA 7B has 6.74 billion."""
    generate = load_generate()
    recipe, vocab_size = parse_recipe(generate.SEVEN_BILLION), generate.VOCAB_SIZE
    with torch.device("meta"):
        model = Gpt(recipe.model, vocab_size, recipe.data.seq_len)
    listed = list_parameters(recipe, vocab_size)
    assert {p.name: p.shape for p in listed} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert count_parameters(listed) == 6_738_415_616  # Touvron et al. 2023, table 2: 6.7B
    for num_ranks, total in ((1, 112), (4, 28), (8, 14)):
        plan = plan_recipe_memory(recipe, Layout(1, num_ranks), vocab_size)["after_backward"]
        assert plan.total / GB == pytest.approx(total, rel=0.05)
        assert plan.total == pytest.approx(16 * 6_738_415_616 / num_ranks, rel=1e-4)


@pytest.mark.parametrize("name", ["memory", "seven-billion", "legal"])
def test_tables_are_current(name: str) -> None:
    text = load_generate().generate()[f"tables/{name}.txt"]
    assert (DOCS / "tables" / f"{name}.txt").read_text(encoding="utf-8") == text, "run make docs"


TOTALS: dict[str, tuple[str, int, dict[Instant, float]]] = {
    # P is the parameters of the model in bytes, as are gradients and each of AdamW's moments.
    "one process": ("", 1, {"at_rest": 3 * P, "after_forward": 3 * P, "after_backward": 4 * P}),
    "one process, later microbatches": ("", 3, {"at_rest": 3 * P, "after_forward": 4 * P}),
    "copies": ("dp_replicate=4", 1, {"at_rest": 4 * P, "after_forward": 4 * P, "after_backward": 4 * P}),
    "copies, later": (  # what was summed is not in the buckets yet
        "dp_replicate=4",
        2,
        {"at_rest": 4 * P, "between": 5 * P, "after_forward": 5 * P, "after_backward": 4 * P},
    ),
    "copies of stages, later": ("pp=2 dp_replicate=2", 2, {"at_rest": 3 * P, "after_forward": 4 * P}),
    "zero 3": (
        "dp_shard=4",
        1,
        {"at_rest": 3 * P / 4, "after_forward": 3 * P / 4 + ROOT, "after_backward": P, "after_step": P},
    ),
    "zero 3, later": ("dp_shard=4", 2, {"between": P, "after_forward": P + ROOT, "after_backward": P}),
    "zero 2": (
        "dp_shard=4 zero=2",
        2,
        {"at_rest": 3 * P / 4, "between": P + P, "after_forward": P + P, "after_backward": P},
    ),
    "zero 1": (
        "dp_shard=4 zero=1",
        2,
        {"at_rest": 3 * P / 4, "between": 3 * P / 4 + P + P, "after_backward": P},
    ),
    "hybrid": ("dp_replicate=2 dp_shard=2", 1, {"at_rest": 3 * P / 2, "after_backward": 2 * P}),
    "hybrid, later": ("dp_replicate=2 dp_shard=2", 2, {"between": 5 * P / 2, "after_backward": 2 * P}),
    "hybrid zero 1": ("dp_replicate=2 dp_shard=2 zero=1", 2, {"between": 3 * P / 2 + 2 * P}),
}


@pytest.mark.parametrize(("text", "num_microbatches", "totals"), TOTALS.values(), ids=TOTALS.keys())
def test_totals(text: str, num_microbatches: int, totals: dict[Instant, float]) -> None:
    layout = Layout.parse(f"dp_replicate=1 {text}" if "replicate" not in text else text)
    plan = plan_memory(BLOCKS, layout, Sizes(num_microbatches=num_microbatches))
    assert {instant: plan[instant].total for instant in totals} == totals


@pytest.mark.parametrize("layout", [Layout(1, 1, 4), Layout(2, 1, 2), Layout(1, 2, 2), Layout(1, 4, 8)])
def test_tp_divides_what_it_splits(layout: Layout) -> None:
    norm = 4 * 64  # the one parameter that stays whole
    plan = plan_memory(BLOCKS, layout)
    assert plan["after_backward"].total == 4 * ((P - norm) / layout.tp + norm) / layout.dp_shard


def test_rows_that_are_not_a_multiple() -> None:
    plan = plan_memory([Parameter("odd", (9, 10))], Layout(1, 4))["after_backward"]
    assert plan.parameters == 3 * 10 * 4, "the first rank's rows; the last one stores as many"


def test_types_and_optimizers() -> None:
    sizes = Sizes(parameter=4, gathered=2, num_moments=1)
    plan = plan_memory(BLOCKS, Layout(1, 4, zero=2), sizes)
    assert plan["after_forward"].gathered == P / 2
    assert plan["after_backward"].optimizer == P / 4


def test_offloading_leaves_what_is_in_use() -> None:
    plan = plan_memory(BLOCKS, Layout(1, 4, offload="cpu"))
    assert plan["at_rest"].on_device == 0
    assert plan["after_forward"].on_device == ROOT
    assert plan["after_step"].offloaded == P


def test_recipes_state_types_and_microbatches() -> None:
    gpt = load_recipe(RECIPES / "gpt-stdlib.toml")
    whole = 4 * count_parameters(list_parameters(gpt))
    plan = plan_recipe_memory(gpt, Layout(2))  # exact: 4 microbatches, 2 per rank, 1 set aside
    assert plan["after_forward"].set_aside == whole
    wide = parse_recipe(gpt.model_dump(), ["train.dtype=fp64"])
    assert plan_recipe_memory(wide, Layout(2))["after_step"].total == 8 * whole
    resnet = load_recipe(RECIPES / "resnet-digits.toml")  # SGD with momentum
    state = plan_recipe_memory(resnet, Layout(1))["at_rest"]
    assert state.optimizer == state.parameters


parts = st.lists(
    st.builds(
        Parameter,
        name=st.just("p"),
        shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
        block=st.sampled_from(["", "0", "1"]),
        tp_dim=st.sampled_from([None, 0]),
    ),
    min_size=1,
    max_size=6,
)
degrees = st.sampled_from([1, 2, 3, 4, 8])


@given(parts, degrees, degrees, st.sampled_from([1, 2]), st.integers(1, 5), st.booleans())
def test_more_sharing_never_needs_more(
    parameters: list[Parameter], num_shards: int, tp: int, copies: int, num_microbatches: int, exact: bool
) -> None:
    sizes = Sizes(num_microbatches=num_microbatches, exact=exact)
    plans = [plan_memory(parameters, Layout(copies, num_shards, tp, zero=zero), sizes) for zero in (3, 2, 1)]
    for instant in plans[0]:
        totals = [plan[instant].total for plan in plans]
        assert totals == sorted(totals), "zero 3 needs least"
    assert len({plan["at_rest"].total for plan in plans}) == 1
    numbers = count_parameters(parameters)
    assert plans[0]["after_step"].total * num_shards * tp >= 16 * numbers, "nothing is lost"


def count(
    parameters: Sequence[Parameter], layout: Layout, *, num_microbatches: int = 1, sums: int = 0
) -> dict[str, float]:
    """Return the bytes that a rank of the layout sends in a step of a model without products."""
    names = dict.fromkeys(p.block for p in parameters if p.block)
    blocks = tuple(
        ModelPart(
            parameters=tuple(p for p in parameters if p.block == name),
            input_bytes=1,
            width_bytes=400,
            num_sums=sums,
        )
        for name in names
    )
    root = ModelPart(parameters=tuple(p for p in parameters if not p.block))
    costs = ModelCosts("made up", root, blocks, ModelPart(), global_batch=num_microbatches * layout.dp)
    return count_sent(costs, layout, [costs.parts])


def test_traffic_of_the_papers() -> None:
    """Sharding everything sends 1.5 times what copies send; replicas of shards sum their chunk."""
    one_unit = [Parameter("all", (1024, 64), "0")]
    whole = 4 * count_parameters(one_unit)
    copies = count(one_unit, Layout(4))
    assert copies == {"dp_replicate": 1.5 * whole}
    assert count(one_unit, Layout(1, 4))["dp_shard"] == 1.5 * copies["dp_replicate"]
    assert count(one_unit, Layout(1, 4, zero=1))["dp_shard"] == copies["dp_replicate"]
    assert count(one_unit, Layout(2, 2)) == {"dp_replicate": whole / 2, "dp_shard": 1.5 * whole}


def test_traffic_of_several_microbatches() -> None:
    ring = 3 / 4
    blocks = P - ROOT
    sent = [count(BLOCKS, Layout(1, 4, zero=zero), num_microbatches=3)["dp_shard"] for zero in (1, 2, 3)]
    assert sent == [ring * 2 * P, ring * (P + 3 * P), ring * 3 * (2 * blocks + ROOT + P)]
    assert count(BLOCKS, Layout(4), num_microbatches=3) == count(BLOCKS, Layout(4)), "once per step"


def test_traffic_of_tp() -> None:
    block = [Parameter("all", (8, 8), "0")]
    one = count(block, Layout(1, 1, 2), sums=2)
    assert one == {"tp": 4 * 400}, "over two ranks a sum sends all bytes once: two forward, two backward"
    assert count(block, Layout(1, 1, 1), sums=2) == {}
    three = [Parameter("all", (8, 8), str(number)) for number in range(3)]
    assert count(three, Layout(1, 1, 2), sums=2, num_microbatches=2)["tp"] == 6 * 4 * 400


def test_traffic_of_a_pipeline() -> None:
    """Each rank sums its own stages, and passes an output on and a gradient back per microbatch."""
    four = [Parameter("all", (8, 8), str(number)) for number in range(4)]
    words = {"products": (Product(1, 8, 8),), "input_bytes": 1, "width_bytes": 400, "num_sums": 2}
    blocks = tuple(ModelPart(parameters=(p,), **words) for p in four)
    costs = ModelCosts("made up", ModelPart(), blocks, ModelPart(), global_batch=12)
    for pp, ways in ((2, 1), (4, 2)):
        layout = Layout(2, 1, 2, pp=pp)
        sent = count_sent(costs, layout, cut_stages(costs, layout))
        own = 4 // pp
        assert sent == {"tp": 6 * own * 4 * 400, "dp_replicate": own * 4 * 64 / 2, "pp": 6 * ways * 400}
