from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from paceline.cli import plan
from paceline.comm.tree import plan_reduction
from paceline.errors import PacelineError
from paceline.plan.parameters import count_parameters, list_parameters
from paceline.plan.traffic_table import plan_recipe_traffic
from paceline.recipe import Layout, load_recipe


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    plan.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, words)])
    code: int = args.run(args)
    return code


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schedule") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[3:10]}
    assert rows["gpipe"][1:] == ["1", "27.3%", "8.0"]
    assert rows["interleaved"][1:3] == ["2", "15.8%"]
    assert rows["zbv"][2] == "5.9%"


def test_one_schedule_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schedule", "1f1b", "--ranks", 2, "--microbatches", 4) == 0
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "idle: 20.0% of the ranks' time (25.0% of their work)" in out
    assert "keeps at once: 2, 1" in out


def test_costs_change_the_idle_share(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("schedule", "zero_bubble", "--ranks", 2, "--microbatches", 4, "--json")
    shares = []
    for costs in ("1,1,1", "1,2,0"):
        assert run(*words, "--costs", costs) == 0
        shares.append(json.loads(capsys.readouterr().out)["idle_share"])
    assert shares[0] < shares[1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("1f1",), "PL474"),
        (("own.txt",), "PL474"),
        (("--ranks", "0"), "PL476"),
        (("--microbatches", "100000"), "PL476"),
        (("--costs", "1,1"), "PL476"),
        (("--costs", "0,0,0"), "PL476"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        run("schedule", *words)
    assert caught.value.code == code


def test_traffic_has_a_row_per_axis_and_names_what_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"
    words = ("--set", "layout.dp_replicate=2", "--set", "layout.tp=2", "--set", "train.dtype=fp32")
    assert run("traffic", recipe, *words, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["ranks"], [row["axis"] for row in table["axes"]]) == (4, ["dp_replicate", "tp"])
    assert all(row["num_bytes"] > 1e5 for row in table["axes"])
    assert run("traffic", recipe, "--set", "layout.pp=2") == 0
    out = capsys.readouterr().out
    assert "where pp cuts it" in out
    assert "?" in out
    assert "not counted: what ranks agree on" in out
    with pytest.raises(PacelineError) as caught:
        run("traffic", recipe, "--set", "data.tokenizer=own.json")
    assert caught.value.code == "PL928"
    assert "own.json" in caught.value.saw


def test_exact_sums_are_counted_by_the_subtrees_of_the_first_rank() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml")
    num_microbatches = -(-recipe.train.global_batch_size // recipe.train.microbatch_size)
    for num_ranks in (2, 3, 4):
        own = -(-num_microbatches // num_ranks)
        shares = [min(own, num_microbatches - own * rank) for rank in range(num_ranks)]
        subtrees = len(plan_reduction(tuple(shares)).subtrees[0])
        [row] = plan_recipe_traffic(recipe, Layout(num_ranks))
        whole = 4 * count_parameters(list_parameters(recipe))
        assert row.num_bytes == pytest.approx((subtrees + 1) * (num_ranks - 1) / num_ranks * whole)
