"""Impossible layouts are refused with all reasons; what is offered in their place works."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codes import read_pages
from paceline.errors import PacelineError
from paceline.recipe import Layout, LayoutErrors, Recipe, Rules, load_recipe, parse_recipe
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import CHOICES
from paceline.recipe.legal import list_candidates
from paceline.recipe.ranks import DdpSection, ShardSection

RECIPES = Path(__file__).parent.parent.parent / "recipes"
GPT = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 10}}
ENCODER = {"model": {"kind": "encoder"}, "data": {"kind": "masked_text"}, "train": {"steps": 10}}
MOE = {
    "model": {"kind": "moe", "experts": 6},
    "data": {"kind": "text"},
    "train": {"steps": 10},
}
RESNET = {"model": {"kind": "resnet"}, "data": {"kind": "digits"}, "train": {"steps": 10}}


def recipe(table: dict[str, Any], *changes: str) -> Recipe:
    return parse_recipe(table, changes)


@dataclass(frozen=True)
class Case:
    """A layout that can't be: what it is for, and words that the three parts of the message have."""

    table: dict[str, Any]
    layout: str
    ranks: int
    code: str
    saw: str
    rule: str
    fix: str
    changes: Sequence[str] = ()


IMPOSSIBLE = {
    "fewer places than ranks": Case(
        GPT, "dp_replicate=2", 8, "PL113", "there are 8 ranks", "product of", "dp_replicate=8"
    ),
    "ranks that tp doesn't divide": Case(GPT, "tp=4", 6, "PL113", "tp=4", "product of", "Start 4 or 8"),
    "more places than ranks": Case(
        GPT, "dp_replicate=2 dp_shard=2 tp=2", 4, "PL113", "dp_shard=2", "product of", "Start 8 ranks"
    ),
    "part of a head": Case(
        GPT,
        "tp=6",
        6,
        "PL132",
        "layout.tp=6 does not divide model.heads=32.",
        "1, 2, 4, 8, 16 or 32.",
        "Set tp to 2, 4, 8 or 16, which divide all",
        ("model.heads=32", "model.hidden=384", "model.ffn_hidden=1536"),
    ),
    "more ranks than heads": Case(
        GPT, "tp=8", 8, "PL132", "tp=8 does not divide model.heads=4", "1, 2 or 4.", "1, 2 or 4"
    ),
    "heads of an encoder": Case(
        ENCODER,
        "tp=3",
        3,
        "PL132",
        "model.heads=4",
        "whole heads",
        "multiple of 3",
        ("model.ffn_hidden=384",),
    ),
    "part of a key head": Case(
        GPT, "tp=4", 4, "PL132", "model.kv_heads=2", "1 or 2.", "1 or 2", ("model.kv_heads=2",)
    ),
    "one key head": Case(
        GPT, "tp=2", 2, "PL132", "kv_heads=1", "must be 1.", "tp to 1", ("model.kv_heads=1",)
    ),
    "feed-forward of odd width": Case(
        GPT, "tp=4", 4, "PL132", "model.ffn_hidden=330", "equal part", "1 or 2", ("model.ffn_hidden=330",)
    ),
    "feed-forward of default width": Case(
        GPT,
        "tp=64",
        64,
        "PL132",
        "model.ffn_hidden=352",
        "equal part",
        "multiple of 64",
        ("model.heads=64",),
    ),
    "feed-forward of an encoder": Case(
        ENCODER, "tp=4", 4, "PL132", "model.ffn_hidden=510", "equal", "1 or 2", ("model.ffn_hidden=510",)
    ),
    "convolutions": Case(RESNET, "tp=2", 2, "PL135", "tp=2", "linear layers", "tp=1"),
    "experts of a dense model": Case(
        GPT, "dp_replicate=2 ep=2", 2, "PL653", "without experts", "mixtures", "Leave ep out"
    ),
    "experts of no replica": Case(
        MOE, "dp_replicate=4 ep=3", 4, "PL654", "dp_replicate=4", "adds no ranks", "multiple of 3"
    ),
    "part of an expert": Case(
        MOE, "dp_replicate=4 ep=4", 4, "PL655", "6 experts", "the same number of experts", "Set ep to 1 or 2."
    ),
    "mixtures and parts of sequences": Case(
        MOE, "tp=2 sequence=true", 2, "PL652", "layout.sequence=true", "whole sequence", "Leave sequence out"
    ),
    "experts beside parts of sequences": Case(
        MOE, "dp_replicate=3 cp=2 ep=3", 6, "PL654", "ep=3 with layout.cp=2", "multiple of cp", "1, 2 or 6"
    ),
    "experts of no data rank": Case(
        MOE, "dp_shard=2 ep=3", 2, "PL654", "dp_shard=2", "data ranks", "multiple of 3"
    ),
    "offloaded shards beside experts": Case(
        MOE, "dp_shard=2 ep=2 offload=cpu", 2, "PL492", "offload=cpu", "not sharded", "offload out"
    ),
    "narrow shards beside experts": Case(
        MOE,
        "dp_shard=2 ep=2",
        2,
        "PL492",
        "param_dtype=bf16",
        "not gathered",
        "dtype",
        ("shard.param_dtype=bf16", "train.dtype=bf16", "train.reduction=fast"),
    ),
    "experts of a searched graph": Case(
        MOE,
        "dp_replicate=2 ep=2",
        2,
        "PL492",
        "ddp.find_unused_parameters=true",
        "wait",
        "ep=1",
        ("ddp.find_unused_parameters=true",),
    ),
    "compiled experts": Case(
        MOE,
        "dp_replicate=2 ep=2",
        2,
        "PL492",
        "train.compile=true",
        "compiled graph",
        "ep=1",
        ("train.compile=true",),
    ),
    "sequence of one rank": Case(
        GPT, "dp_replicate=2 sequence=true", 2, "PL138", "tp=1", "over the ranks of tp", "leave sequence out"
    ),
    "a sequence that tp doesn't divide": Case(
        GPT,
        "tp=4 sequence=true",
        4,
        "PL137",
        "data.seq_len=130",
        "equal part",
        "seq_len=128 or 132",
        ("data.seq_len=130",),
    ),
    "zero of nothing": Case(GPT, "dp_replicate=4 zero=2", 4, "PL138", "zero=2", "sharded", "dp_shard=2"),
    "offloading whole copies": Case(
        GPT, "dp_replicate=2 offload=cpu", 2, "PL138", "offload=cpu", "shards", "leave offload out"
    ),
    "offloading in one process": Case(GPT, "offload=cpu", 1, "PL138", "offload=cpu", "shards", "dp_shard=2"),
    "from the CPU to the CPU": Case(
        GPT, "dp_shard=2 offload=cpu", 2, "PL147", "on the CPU", "GPU", "Leave it out", ("train.device=cpu",)
    ),
    "settings of shards without shards": Case(
        GPT, "dp_replicate=2", 2, "PL138", "shard.prefetch=2", "dp_shard", "leave them", ("shard.prefetch=2",)
    ),
    "types of shards without shards": Case(
        GPT,
        "dp_replicate=2 tp=2",
        4,
        "PL138",
        "shard.param_dtype=bf16",
        "dp_shard",
        "leave them",
        ("shard.param_dtype=bf16", "train.dtype=bf16", "train.reduction=fast"),
    ),
    "gathered in another type": Case(
        GPT,
        "dp_shard=2",
        2,
        "PL130",
        "param_dtype=bf16 with train.dtype=fp32",
        "must be the same",
        "train.dtype=bf16",
        ("shard.param_dtype=bf16", "train.reduction=fast"),
    ),
    "rounding beside exact": Case(
        GPT,
        "dp_shard=2",
        2,
        "PL148",
        'param_dtype=bf16 with train.reduction="exact"',
        "same bits",
        'reduction="fast"',
        ("shard.param_dtype=bf16", "train.dtype=bf16"),
    ),
    "sums narrower than fp64": Case(
        GPT,
        "dp_shard=2",
        2,
        "PL148",
        "reduce_dtype=fp32",
        "same bits",
        "Leave it out",
        ("shard.reduce_dtype=fp32", "train.dtype=fp64"),
    ),
    "buckets of shards": Case(
        GPT,
        "dp_shard=2",
        2,
        "PL141",
        "ddp.bucket_cap_mb=1.0 with layout.dp_shard=2",
        "dp_shard=1",
        "out",
        ("ddp.bucket_cap_mb=1.0",),
    ),
    "a static graph of tp alone": Case(
        GPT,
        "tp=2",
        2,
        "PL141",
        "dp_replicate=1 layout.tp=2",
        "above 1",
        "out",
        ("ddp.find_unused_parameters=true",),
    ),
    "more shards than rows": Case(
        RESNET, "dp_shard=128", 128, "PL144", "more than 64 rows", "hold nothing", "dp_shard=64"
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible(case: Case) -> None:
    asked, layout = recipe(case.table, *case.changes), Layout.parse(case.layout)
    found = {finding.code: finding for finding in Rules.of(asked).check(layout, case.ranks)}
    assert list(found) == [case.code], "one thing is wrong"
    finding = found[case.code]
    assert case.saw in finding.saw
    assert case.rule in finding.rule
    assert case.fix in finding.fix
    assert case.code in read_pages()
    assert finding.where.split(".")[0] in finding.saw
    with pytest.raises(LayoutErrors) as caught:
        Rules.of(asked).refuse(layout, case.ranks)
    assert caught.value.code == case.code
    for offered in caught.value.nearest:
        assert Rules.of(asked).check(offered, case.ranks) == []
        assert str(offered) in str(caught.value)


FOREIGN = {
    "no blocks": (ModelFacts(num_blocks=0), RunFacts(), "dp_replicate=2 recompute=block", "PL143", "block"),
    "heads of another name": (
        ModelFacts(inner=(("encoder.fc1", 30),)),
        RunFacts(),
        "tp=4",
        "PL132",
        "encoder.fc1=30",
    ),
}


@pytest.mark.parametrize(("model", "run", "text", "code", "saw"), FOREIGN.values(), ids=FOREIGN.keys())
def test_models_that_are_no_recipes(model: ModelFacts, run: RunFacts, text: str, code: str, saw: str) -> None:
    layout = Layout.parse(text)
    world_size = layout.dp_shard * layout.tp * (layout.dp_replicate or 1)
    (finding,) = Rules(model, run).check(layout, world_size)
    assert finding.code == code
    assert saw in finding.saw
    with pytest.raises(PacelineError, match=code):
        Rules(model, run).refuse(layout, world_size)


def test_nothing_is_refused_that_is_not_known() -> None:
    rules = Rules(ModelFacts(), RunFacts())
    assert rules.check(Layout.parse("dp_shard=5 tp=7 sequence=true zero=1 recompute=block"), 35) == []


def test_all_reasons_at_once() -> None:
    asked = recipe(GPT, "model.kv_heads=2", "shard.prefetch=2")
    layout = Layout.parse("tp=3 zero=1 sequence=true offload=cpu")
    with pytest.raises(LayoutErrors) as caught:
        Rules.of(asked).refuse(layout, 8)
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["PL113", *["PL132"] * 3, "PL137", *["PL138"] * 3]
    text = str(caught.value)
    assert text.startswith('layout "dp_replicate=auto tp=3 zero=1 sequence=true offload=cpu" on 8 ranks: 8 ')
    assert all(f"[{code}]" in text for code in codes)


def test_the_guide_shows_what_is_stated() -> None:
    asked = load_recipe(RECIPES / "gpt-stdlib.toml", ["model.heads=32", "model.ffn_hidden=1536"])
    with pytest.raises(LayoutErrors) as caught:
        Rules.of(asked).refuse(Layout.parse("tp=6 zero=2"), 8)
    assert str(caught.value) in (RECIPES.parent / "docs" / "layouts.md").read_text(encoding="utf-8")


def test_a_refusal_crosses_processes() -> None:
    with pytest.raises(LayoutErrors) as caught:
        Rules.of(recipe(GPT)).refuse(Layout.parse("tp=3 zero=1"), 8)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.nearest == caught.value.nearest != []


def test_refuse_lets_pass_what_works() -> None:
    Rules.of(recipe(GPT)).refuse(Layout.parse("dp_shard=2 tp=2 zero=2 sequence=true recompute=block"), 8)


@pytest.mark.parametrize(
    ("asked", "world_size", "first"),
    [
        ("tp=8", 8, "dp_replicate=2 tp=4"),
        ("dp_replicate=2 tp=2", 8, "dp_replicate=4 tp=2"),
        ("dp_shard=4 tp=3 zero=2", 8, "dp_replicate=1 dp_shard=4 tp=2 zero=2"),
        ("dp_replicate=4 sequence=true", 4, "dp_replicate=4"),
        ("tp=2 recompute=block zero=1", 2, "dp_replicate=1 tp=2 recompute=block"),
        ("dp_replicate=2 dp_shard=2", 5, "dp_replicate=5"),
    ],
)
def test_the_nearest(asked: str, world_size: int, first: str) -> None:
    assert str(Rules.of(recipe(GPT)).nearest(Layout.parse(asked), world_size)[0]) == first


REMARKS = {
    "the mask token": (ENCODER, "tp=2 dp_replicate=1", ("train.reduction=fast",), "PL150", "257"),
    "idle copies": (
        GPT,
        "dp_replicate=8",
        (),
        "PL131",
        "4 microbatches for 8 data ranks",
    ),
    "idle shards": (GPT, "dp_shard=8", (), "PL131", "4 microbatches for 8 data ranks"),
    "repeated experts": (MOE, "cp=2", ("train.reduction=fast",), "PL665", "layout.ep=1"),
    "bits of one tp": (GPT, "tp=2", (), "PL151", "tp=2"),
    "settings for many": (
        GPT,
        "",
        ("ddp.find_unused_parameters=true", "shard.prefetch=0"),
        "PL152",
        "shard.prefetch=0",
    ),
}


@pytest.mark.parametrize(("table", "text", "changes", "code", "saw"), REMARKS.values(), ids=REMARKS.keys())
def test_what_works_and_may_surprise(
    table: dict[str, Any], text: str, changes: tuple[str, ...], code: str, saw: str
) -> None:
    asked, layout = recipe(table, *changes), Layout.parse(text)
    world_size = layout.dp_shard * layout.cp * layout.tp * (layout.dp_replicate or 1)
    assert Rules.of(asked).check(layout, world_size) == []
    (remark,) = Rules.of(asked).remark(layout, world_size)
    assert (remark.code, saw in remark.saw) == (code, True)
    assert code in read_pages()


def test_nothing_to_remark() -> None:
    fast = recipe(GPT, "train.reduction=fast")
    assert Rules.of(fast).remark(Layout.parse("dp_replicate=2 dp_shard=2 tp=2 zero=1"), 8) == []


COUNTS = {
    # Of 4 blocks: pp=2 and pp=4; of 2 blocks: pp=2; alone or with dp_replicate, dp_shard, cp, tp (no ResNet).
    "gpt-stdlib": [(1, 6), (8, 30), (31, 90), (80, 210)],
    "encoder-dropout": [(1, 6), (8, 30), (30, 90), (73, 210)],
    "resnet-digits": [(1, 6), (5, 30), (11, 90), (17, 210)],
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_shipped_recipes(name: str) -> None:
    asked = load_recipe(RECIPES / f"{name}.toml")
    counts = [Rules.of(asked).enumerate(world_size) for world_size in (1, 2, 4, 8)]
    assert [(len(legal), total) for legal, total in counts] == COUNTS[name]
    for (legal, _), world_size in zip(counts, (1, 2, 4, 8), strict=True):
        assert {layout.num_ranks for layout in legal} == {world_size}
        assert len(set(legal)) == len(legal)


def test_recompute_and_offload_are_counted_where_asked_for() -> None:
    asked = recipe(GPT)
    legal, total = Rules.of(asked).enumerate(4, recompute=CHOICES["recompute"], offload=("none", "cpu"))
    assert total == 90 * 3 * 2
    # Offloading needs shards: dp_shard=4 and dp_shard=2 have 3 each, dp_shard=2 tp=2 has 6, dp_shard=2 cp=2
    # has 3. A pipeline has 8, and offloads nothing; cp has 6 in memory.
    assert len(legal) == 3 * (17 + 3 + 3 + 6 + 3 + 8 + 6)


sizes = st.integers(1, 8).map(lambda power: 2**power) | st.sampled_from([1, 3, 6, 12, 30, 48, 100])
maybe = st.none() | sizes
models = st.builds(
    ModelFacts,
    splits=st.booleans(),
    heads=maybe,
    kv_heads=maybe,
    inner=st.lists(sizes, max_size=2).map(lambda widths: tuple(("width", width) for width in widths)),
    vocab_size=maybe,
    seq_len=maybe,
    max_rows=maybe,
    num_blocks=st.none() | st.integers(0, 4),
    num_experts=st.just(0) | maybe,
)
runs = st.builds(
    RunFacts,
    dtype=st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    reduction=st.sampled_from(["fast", "exact"]),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    num_microbatches=maybe,
    ddp=st.builds(DdpSection, find_unused_parameters=st.booleans()),
    shard=st.builds(
        ShardSection,
        param_dtype=st.sampled_from(["none", "bf16"]),
    ),
)
layouts = st.builds(
    Layout,
    dp_replicate=st.none() | st.integers(1, 9),
    dp_shard=st.integers(1, 9),
    tp=st.integers(1, 9),
    ep=st.sampled_from([1, 1, 2, 3, 4]),
    **{name: st.sampled_from(choices) for name, choices in CHOICES.items()},
)
worlds = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 30])


@given(models, runs, worlds)
def test_what_is_listed_passes_and_what_is_not_does_not(
    model: ModelFacts, run: RunFacts, world_size: int
) -> None:
    rules = Rules(model, run)
    legal, total = rules.enumerate(world_size)
    has_experts = model.num_experts != 0
    candidates = list(list_candidates(world_size, ("none",), ("none",), has_experts=has_experts))
    assert total == len(candidates)
    for candidate in candidates:
        findings = rules.check(candidate, world_size)
        assert (candidate in legal) == (findings == [])
        if candidate.dp_replicate == world_size // candidate.dp_shard // candidate.tp:
            assert rules.check(replace(candidate, dp_replicate=None), world_size) == findings


@given(models, runs, layouts, worlds)
def test_what_is_offered_works(model: ModelFacts, run: RunFacts, layout: Layout, world_size: int) -> None:
    rules = Rules(model, run)
    offered = rules.nearest(layout, world_size)
    assert len(offered) == len(set(offered)) <= 3
    assert all(rules.check(near, world_size) == [] for near in offered)
    if rules.check(layout, world_size) == []:
        assert layout.dp_replicate is None or offered[0] == layout
        rules.refuse(layout, world_size)
        rules.remark(layout, world_size)
    else:
        with pytest.raises(LayoutErrors) as caught:
            rules.refuse(layout, world_size)
        assert caught.value.nearest == offered
        for problem in caught.value.problems:
            assert problem.code in read_pages()
            assert re.search(r"\d|=", problem.saw), "the value"
            assert problem.rule.endswith(".")
            assert problem.fix.endswith(".")


def test_many_ranks_are_answered_at_once() -> None:
    asked = recipe(GPT)
    legal, total = Rules.of(asked).enumerate(4096)
    assert total == 1820 * 6
    assert 0 < len(legal) < total
    assert Rules.of(asked).nearest(Layout.parse("tp=64"), 4096)[0].tp == 4
