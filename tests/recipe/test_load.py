"""Reading recipes: good ones, settings, and what a person is told about bad ones."""

from __future__ import annotations

import copy
import os
import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from paceline.codes import read_pages
from paceline.errors import PacelineError, RecipeErrors
from paceline.recipe import dump_recipe, load_recipe, parse_recipe
from paceline.recipe.schema import AdamW, Sgd

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SMALL: dict[str, Any] = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 10}}


def small(**sections: Any) -> dict[str, Any]:
    """Return the smallest recipe with these sections in place of its own; None takes one away."""
    table = copy.deepcopy(SMALL) | sections
    return {name: section for name, section in table.items() if section is not None}


def problems_of(table: dict[str, Any], *settings: str) -> list[PacelineError]:
    with pytest.raises(RecipeErrors) as caught:
        parse_recipe(table, settings)
    return caught.value.problems


def test_defaults_are_complete() -> None:
    recipe = parse_recipe(SMALL)
    assert recipe.train.steps == 10
    assert recipe.optimizer == AdamW(kind="adamw")
    assert recipe.layout.dp_replicate == "auto"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_recipes_load(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(tomllib.loads(dump_recipe(recipe))) == recipe


def test_parsing_leaves_the_callers_table_alone() -> None:
    table = small(optimizer={"lr": 0.5})
    before = copy.deepcopy(table)
    parse_recipe(table, ["train.steps=7", "optimizer.kind=sgd"])
    with pytest.raises(RecipeErrors):
        parse_recipe(table, ["train.steps=-7"])
    assert table == before


@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("train.steps=100", "train", "steps", 100),
        (" train.steps = 100 ", "train", "steps", 100),
        ("train.dtype=bf16", "train", "dtype", "bf16"),
        ('train.dtype="bf16"', "train", "dtype", "bf16"),
        ("optimizer.lr=1e-2", "optimizer", "lr", 0.01),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ('data.files=["a", "b/*.txt"]', "data", "files", ["a", "b/*.txt"]),
        ("train.compile=true", "train", "compile", True),
        ("layout.dp_replicate=4", "layout", "dp_replicate", 4),
        ("data.cache_dir=/tmp/a=b", "data", "cache_dir", "/tmp/a=b"),
        ("optimizer.lr_scaling=none", "optimizer", "lr_scaling", "none"),
        ("model.kv_heads=none", "model", "kv_heads", None),
    ],
)
def test_settings_override(setting: str, section: str, key: str, value: object) -> None:
    recipe = parse_recipe(SMALL, [setting])
    assert getattr(getattr(recipe, section), key) == value


def test_the_last_setting_wins() -> None:
    recipe = parse_recipe(SMALL, ["train.steps=3", "train.steps=4"])
    assert recipe.train.steps == 4


def test_a_setting_can_replace_steps_by_epochs() -> None:
    recipe = parse_recipe(SMALL, ["train.steps=none", "train.epochs=2"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2)


def test_a_setting_can_choose_another_kind() -> None:
    assert parse_recipe(SMALL, ["optimizer.kind=sgd"]).optimizer == Sgd(kind="sgd")


def test_the_tail_of_a_setting_is_never_lost() -> None:
    (problem,) = problems_of(SMALL, "train.steps=1\nseed=2")
    assert "seed=2" in problem.saw


@pytest.mark.parametrize(
    "setting", ["train.steps", "=3", "train.=3", ".steps=3", "", "data.files.x.y=1", "data.kind.x=1"]
)
def test_malformed_settings(setting: str) -> None:
    table = small(data={"kind": "text", "files": ["a"]})
    with pytest.raises(PacelineError) as caught:
        parse_recipe(table, [setting])
    assert caught.value.code == "PL123"
    assert setting in caught.value.saw


def test_missing_file_suggests_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "gpt-stdlib.toml").write_text("")
    with pytest.raises(PacelineError, match=r"Did you mean .*gpt-stdlib\.toml") as caught:
        load_recipe(tmp_path / "gpt-sdtlib.toml")
    assert caught.value.code == "PL121"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="does not exist") as caught:
        load_recipe(tmp_path / "nowhere" / "x.toml")
    assert caught.value.code == "PL121"


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        load_recipe(tmp_path)
    assert caught.value.code == "PL121"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("")
    path.chmod(0)
    with pytest.raises(PacelineError) as caught:
        load_recipe(path)
    assert caught.value.code == "PL121"


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PacelineError) as caught:
        load_recipe(path)
    assert caught.value.code == "PL121"


def test_not_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[model]\nkind = gpt\n")
    with pytest.raises(PacelineError, match="line 2") as caught:
        load_recipe(path)
    assert caught.value.code == "PL122"


ONE_PROBLEM = {
    "unknown key": (small(train={"stpes": 3}), "PL100", "unknown key train.stpes.", '"steps"'),
    "unknown key of a kind": (
        small(model={"kind": "gpt", "hiden": 3}),
        "PL100",
        "unknown key model.hiden.",
        '"hidden"',
    ),
    "key of another kind": (
        small(optimizer={"momentum": 0.9}),
        "PL100",
        "unknown key optimizer.momentum.",
        "Remove",
    ),
    "unknown section": (small(trian={"steps": 3}), "PL100", "unknown key trian.", '"train"'),
    "misspelt section": (small(train=None, trian={"steps": 3}), "PL100", "unknown key trian.", '"train"'),
    "missing section": (small(model=None), "PL101", "model is missing.", "[model]"),
    "section is a value": (small(model="gpt"), "PL101", 'model="gpt".', "[model]"),
    "missing kind": (small(model={"layers": 2}), "PL101", "model.kind is missing.", 'kind = "gpt"'),
    "unknown kind": (small(model={"kind": "gtp"}), "PL101", 'model.kind="gtp".', '"gpt"'),
    "string for a number": (small(train={"steps": "10"}), "PL101", 'train.steps="10".', "steps"),
    "float for an integer": (small(train={"steps": 1.0}), "PL101", "train.steps=1.0.", "steps"),
    "bool for an integer": (small(train={"steps": True}), "PL101", "train.steps=true.", "steps"),
    "in a table of a section": (
        *(small(islands={"outer": {"lr": "1"}}), "PL101", 'islands.outer.lr="1".', "lr = 0.9"),
    ),
    "unknown in a table of a section": (
        *(small(islands={"outer": {"lrr": 1.0}}), "PL100", "unknown key islands.outer.lrr.", '"lr"'),
    ),
    "a warm-up of islands beyond the run": (
        *(
            small(islands={"count": 2, "warmup_steps": 10**6}),
            "PL673",
            "islands.warmup_steps=1000000",
            "or less",
        ),
    ),
    "a period of islands beyond the run": (
        *(small(islands={"count": 2, "every": 10**6}), "PL673", "islands.every=1000000", "or less"),
    ),
    "a negative staleness": (
        *(small(asynchronous={"staleness": -1}), "PL101", "asynchronous.staleness=-1.", "staleness = 0"),
    ),
    "zero": (small(model={"kind": "gpt", "layers": 0}), "PL101", "model.layers=0.", "layers = 4"),
    "negative": (small(optimizer={"lr": -0.1}), "PL101", "optimizer.lr=-0.1.", "lr = 0.001"),
    "not a number": (small(optimizer={"lr": float("nan")}), "PL101", "optimizer.lr=nan.", "lr = 0.001"),
    "infinite": (small(optimizer={"lr": float("inf")}), "PL101", "optimizer.lr=inf.", "lr = 0.001"),
    "too large for 64 bits": (small(train={"steps": 1, "seed": 2**64}), "PL101", "train.seed=", "seed = 0"),
    "not a choice": (
        small(train={"steps": 1, "dtype": "fp8"}),
        "PL101",
        'train.dtype="fp8".',
        'dtype = "fp32"',
    ),
    "one file instead of a list": (
        small(data={"kind": "text", "files": "a"}),
        "PL101",
        'data.files="a".',
        '["a"]',
    ),
    "item of a list": (
        small(data={"kind": "text", "files": ["a", 1]}),
        "PL101",
        "data.files[1]=1.",
        "python-stdlib",
    ),
    "neither number nor auto": (
        small(layout={"dp_replicate": "two"}),
        "PL101",
        'layout.dp_replicate="two".',
        '"auto"',
    ),
    "neither positive nor auto": (
        small(layout={"dp_replicate": 0}),
        "PL101",
        "layout.dp_replicate=0.",
        '"auto"',
    ),
    "heads": (small(model={"kind": "gpt", "heads": 6}), "PL102", "model.heads=6", "4 or 8"),
    "heads of an encoder": (
        small(model={"kind": "encoder", "heads": 6}, data={"kind": "masked_text"}),
        "PL102",
        "model.heads=6",
        "4 or 8",
    ),
    "no heads fit": (
        small(model={"kind": "gpt", "hidden": 15, "heads": 4}),
        "PL102",
        "model.hidden=15",
        "Make hidden",
    ),
    "odd heads": (small(model={"kind": "gpt", "hidden": 12}), "PL103", "heads of width 3", "even"),
    "kv_heads": (small(model={"kind": "gpt", "kv_heads": 3}), "PL104", "model.kv_heads=3", "1, 2, 4"),
    "bpe without size": (
        small(data={"kind": "text", "tokenizer": "bpe"}),
        "PL105",
        "data.vocab_size=None",
        "4096",
    ),
    "size without bpe": (
        small(data={"kind": "text", "vocab_size": 300}),
        "PL105",
        "data.vocab_size=300",
        "neither",
    ),
    "small bpe": (
        small(data={"kind": "text", "tokenizer": "bpe", "vocab_size": 256}),
        "PL106",
        "data.vocab_size=256.",
        "257",
    ),
    "no length": (small(train={}), "PL107", "neither train.steps nor train.epochs", "train.steps=100"),
    "two lengths": (
        small(train={"steps": 1, "epochs": 2}),
        "PL107",
        "train.epochs=2",
        "--set train.steps=none",
    ),
    "microbatch": (
        small(train={"steps": 1, "microbatch_size": 32}),
        "PL108",
        "train.microbatch_size=32",
        "16 or less",
    ),
    "scaling without base": (
        small(optimizer={"lr_scaling": "linear"}),
        "PL109",
        "optimizer.base_batch_size=None",
        "both",
    ),
    "base without scaling": (
        small(optimizer={"base_batch_size": 8}),
        "PL109",
        "optimizer.base_batch_size=8",
        "both",
    ),
    "no zero of ours": (small(layout={"zero": 4}), "PL101", "layout.zero=4", "zero = 3"),
    "true as a word": (small(layout={"sequence": "true"}), "PL101", "layout.sequence", "sequence = false"),
    "shard's own key": (small(shard={"prefetch": -1}), "PL101", "shard.prefetch=-1", "prefetch = 1"),
    "nesterov": (
        small(optimizer={"kind": "sgd", "nesterov": True, "momentum": 0.0}),
        "PL114",
        "optimizer.nesterov=true",
        "momentum=0.9",
    ),
    "model and data": (
        small(data={"kind": "digits"}),
        "PL116",
        "data.kind='digits'",
        "'text'",
    ),
    "warm-up": (small(optimizer={"warmup_steps": 11}), "PL117", "optimizer.warmup_steps=11", "10 or less"),
}


@pytest.mark.parametrize(("table", "code", "saw", "fix"), ONE_PROBLEM.values(), ids=ONE_PROBLEM.keys())
def test_one_problem(table: dict[str, Any], code: str, saw: str, fix: str) -> None:
    (problem,) = problems_of(table)
    assert problem.code == code
    assert saw in problem.saw
    assert fix in problem.fix
    assert problem.rule.endswith(".")
    assert code in read_pages()


def test_all_problems_in_one_go_and_in_the_order_of_the_file() -> None:
    table = {
        "optimizer": {"warmup_steps": 11, "betas": [0.9]},
        "ddp": {"bucket_cap_mb": -1.0},
        "train": {"steps": 10, "microbatch_size": 17, "clip_norm": -1.0},
        "extra": {},
        "model": {"kind": "gpt", "layers": 0, "heads": 3},
        "data": {"kind": "text", "file": ["a"]},
    }
    found = [(problem.code, problem.saw.split()[0]) for problem in problems_of(table)]
    assert found == [
        ("PL117", "optimizer.warmup_steps=11"),
        ("PL101", "optimizer.betas=[0.9]."),
        ("PL101", "ddp.bucket_cap_mb=-1.0."),
        ("PL108", "train.microbatch_size=17"),
        ("PL101", "train.clip_norm=-1.0."),
        ("PL100", "unknown"),
        ("PL101", "model.layers=0."),
        ("PL102", "model.heads=3"),
        ("PL100", "unknown"),
    ]


def test_a_typing_error_is_not_also_reported_as_a_missing_key() -> None:
    assert [problem.code for problem in problems_of(small(train={"stpes": 3}))] == ["PL100"]
    assert [problem.code for problem in problems_of(small(train={"steps": -3}))] == ["PL101"]


def test_the_message_of_several_problems_names_file_and_number() -> None:
    with pytest.raises(RecipeErrors) as caught:
        parse_recipe(small(train={"steps": 0, "seed": -1}), where="runs/x.toml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "runs/x.toml: 2 problems"
    assert len(lines) == 3
    assert all(line.endswith("[PL101]") for line in lines[1:])


def test_errors_cross_processes() -> None:
    with pytest.raises(RecipeErrors) as caught:
        parse_recipe(small(train={"steps": 0, "seed": -1}))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("settings", "warmup", "remarks"),
    [
        (["train.steps=20"], 1, 1),
        (["train.steps=40"], 2, 1),
        (["train.steps=5"], 1, 1),
        (["train.steps=50"], 50, 0),
        (["train.steps=2000"], 50, 0),
        (["train.steps=20", "optimizer.warmup_steps=7"], 7, 0),
        ([], 50, 0),
    ],
)
def test_a_shorter_run_shortens_the_warm_up_of_the_file(
    tmp_path: Path, settings: list[str], warmup: int, remarks: int
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(small(train={"steps": 1000}, optimizer={"warmup_steps": 50})))
    told: list[str] = []
    assert load_recipe(path, settings, remark=told.append).optimizer.warmup_steps == warmup
    assert len(told) == remarks
    assert all(f"warmup_steps={warmup} instead of 50" in text for text in told)


def test_a_warm_up_that_does_not_fit_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(small(train={"steps": 10}, optimizer={"warmup_steps": 50})))
    for settings in ([], ["train.steps=5"]):
        with pytest.raises(RecipeErrors, match="PL117"):
            load_recipe(path, settings)
