"""`paceline verify`: exit codes, what it prints, and which layouts it takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from paceline.cli.main import main
from paceline.cli.verify import choose_layouts
from paceline.cli.verify_report import (
    Asked,
    as_plain,
    as_table,
    describe_end,
    describe_layout,
)
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.recipe import Layout, load_recipe
from paceline.verifying.check import LayoutResult, Verified
from tests.train.cases import text_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "gpt.toml"
    path.write_text(tomli_w.dumps(text_recipe(tmp_path / "text")))
    return str(path)


def test_a_right_layout_ends_with_0(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", recipe, "--layout", "dp_replicate=2", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 layout, against one process; 1 steps, fp64" in out
    assert "dp_replicate=2" in out
    assert "every bit the same" in out
    assert "1 layout: 1 the same as one process." in out


def test_json_has_everything(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layout", "dp_replicate=2", "--steps", "1", "--dtype", "fp32", "--set", "train.reduction=fast"]
    assert main(["verify", recipe, *words, "--json"]) == 0
    captured = capsys.readouterr()
    table = json.loads(captured.out)
    assert table["ok"]
    assert (table["dtype"], table["reduction"], table["num_steps"]) == ("fp32", "fast", 1)
    (result,) = table["results"]
    assert (result["layout"], result["status"], result["findings"]) == ("dp_replicate=2", "ok", [])
    assert 0 < result["worst"] < 1
    assert len(table["tolerances"]["1/loss/"]) == 3
    assert "dp_replicate=2" in captured.err, "progress goes beside the object"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all"], "--all without --nproc"),
        (["--all", "--nproc", "2", "--layout", "tp=2"], "--all with --layout"),
        (["--nproc", "0"], "--nproc 0"),
        (["--layout", "dp_replicate=2", "--steps", "0"], "steps=0"),
        (["--layout", "dp_replicate=two"], "PL110"),
        (["--layout", "tp=3"], "tp=3"),
        (["--layout", "dp_replicate=3", "--nproc", "2"], "PL113"),
    ],
)
def test_wrong_input_ends_with_2(
    recipe: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", recipe, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def choose(recipe: str, *layouts: str, **flags: Any) -> Asked:
    settings = {"layouts": list(layouts), "all": False, "nproc": None, **flags}
    return choose_layouts(load_recipe(recipe), argparse.Namespace(**settings))


def test_which_layouts_are_taken(recipe: str) -> None:
    assert choose(recipe).layouts == [Layout(1)], "the recipe's own"
    assert choose(recipe, nproc=4).layouts == [Layout(4)]
    assert choose(recipe, "tp=2").layouts == [Layout(1, tp=2)]
    assert choose(recipe, "tp=2", "dp_shard=2", nproc=4).layouts == [Layout(2, tp=2), Layout(2, dp_shard=2)]
    assert choose(recipe, "tp=2", "dp_replicate=1 tp=2").layouts == [Layout(1, tp=2)], "each once"
    everything = choose(recipe, all=True, nproc=4)
    assert {layout.num_ranks for layout in everything.layouts} == {1, 2, 4}
    assert everything.num_candidates == len(everything.layouts) + len(everything.refused)
    assert all(findings for _, findings in everything.refused), "each with its reason"
    with pytest.raises(PacelineError):
        choose(recipe, "tp=8 dp_replicate=1")


def test_a_recipe_that_stretches_is_verified_on_the_given_ranks(recipe: str) -> None:
    stretched = load_recipe(recipe, ["layout.dp_shard=auto"])
    found = choose_layouts(stretched, argparse.Namespace(layouts=[], all=False, nproc=2))
    assert found.layouts == [Layout(1, dp_shard=2)]


WRONG = Finding(
    "PL703", "dp_replicate=2, step 1, the sum of gradients", "It is 1/2.", "It is a sum.", "Look."
)
VERIFIED = Verified(
    results=[
        LayoutResult(
            "dp_replicate=1", 1, "ok", same_bits=True, forward_bits=True, num_compared=10, seconds=0.1
        ),
        LayoutResult("dp_replicate=2", 2, "differs", float("inf"), 3.0, "1/gradient/x", findings=[WRONG]),
        LayoutResult(
            "dp_replicate=4", 4, "ok", 0.02, 2.0, "2/loss/", forward_bits=False, num_compared=10, seconds=0.2
        ),
    ],
    dtype="fp64",
    reduction="fast",
    num_steps=2,
    clip_norm=0.5,
    num_tensors=5,
    num_microbatches=[4, 4],
    factor=100.0,
    tolerances={"1/gradient/x": (1e-16, 1.0, 1e-14), "0/initial/x": (0.0, 1.0, 0.0)},
    reference_s=1.0,
    draws=[],
)


def test_what_people_read() -> None:
    asked = Asked(
        [Layout(1), Layout(2), Layout(4)], 5, [(Layout(1, tp=2), [WRONG]), (Layout(1, tp=4), [WRONG])]
    )
    lines = [describe_layout(result) for result in VERIFIED.results]
    assert "every bit the same" in lines[0]
    assert "DIFFERS" in lines[1]
    assert "inf times its tolerance, gradient of x, step 1" in lines[1]
    assert "at 0.02 of its tolerance, loss, step 2; forward: within rounding" in lines[2]
    end = describe_end(VERIFIED, asked)
    assert "3 layouts: 2 the same as one process, 1 not the same." in end
    assert "3 of 5 layouts are legal" in end
    assert "   2  It is 1/2. It is a sum. [PL703]" in end
    assert str(WRONG) in end


def test_json_knows_no_infinity() -> None:
    text = json.dumps(as_table(VERIFIED, Asked([])), allow_nan=False)
    assert json.loads(text)["results"][1]["worst"] == "inf"
    assert not json.loads(text)["ok"]
    assert as_plain({"a": [1.0, (float("-inf"),)]}) == {"a": [1.0, ["-inf"]]}


def test_a_compressed_recipe_is_verified_in_its_own_type(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layout", "dp_replicate=2", "--steps", "2", "--set", "compress.kind=int8", "--json"]
    assert main(["verify", recipe, *words]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["ok"], table["dtype"]) == (True, "fp32")
    assert all(result["same_bits"] for result in table["results"])
    [remark] = table["remarks"]
    assert remark["code"] == "PL724"
    assert 'compress.kind="int8" in 2 slots' in remark["saw"]


OWN = str(Path(__file__).parent / "own_loop.py")


def test_the_model_and_loss_of_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{OWN}:check", "--layout", "tp=2", "--steps", "1"]) == 0
    assert "1 layout: 1 the same as one process" in capsys.readouterr().out
    assert main(["verify", f"{OWN}:faulty", "--layout", "dp_replicate=2", "--steps", "1"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "words", "said"),
    [
        ("without_model", ["--layout", "tp=2"], "no model_fn"),
        ("with_layouts", ["--layout", "tp=2"], "returned layouts"),
        ("three", ["--layout", "tp=2"], "returned a int"),
        ("nothing", ["--layout", "tp=2"], "no function nothing"),
        ("check", ["--all", "--nproc", "2"], "--all"),
        ("check", ["--set", "train.steps=2", "--layout", "tp=2"], "--set"),
        ("check", [], "no layout"),
    ],
)
def test_functions_that_describe_nothing(
    capsys: pytest.CaptureFixture[str], function: str, words: list[str], said: str
) -> None:
    assert main(["verify", f"{OWN}:{function}", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "[PL720]" in printed


@pytest.mark.parametrize("source", ["no_such_module:check", "no_such_file.py:check"])
def test_files_that_cannot_be_imported(capsys: pytest.CaptureFixture[str], source: str) -> None:
    assert main(["verify", source, "--layout", "tp=2"]) == 2
    assert "cannot be imported" in capsys.readouterr().err


def test_updates_that_ranks_compute_apart_are_not_verified(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layout", "dp_replicate=2", "--set", "asynchronous.staleness=1"]
    assert main(["verify", recipe, *words]) == 2
    assert "asynchronous.staleness=1. Gradients and weights" in (err := capsys.readouterr().err)
    assert "[PL743]" in err
