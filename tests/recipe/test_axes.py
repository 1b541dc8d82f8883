"""The table of axes: what follows from it, and what a new axis needs besides its row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import paceline
from paceline.recipe import Layout
from paceline.recipe.axes import AXES, OPEN, list_axes

# Two axes that do nothing but replicate, at places where the other axes of data are not neighbours: the ranks
# of one compute the same as each other, those of the other share out data.
ROWS = {
    "dp_shard": '    echo: int = _ranks("Ranks that compute the same as each other.", change_cost=0.5)\n',
    "tp": '    spread: int = _ranks("Ranks that replicate.", shares_data=True)\n',
}
# An axis that does something: each of its ranks multiplies its gradients by their number. By file, what its
# lines stand before; None: the file is new.
DOES = {
    "recipe/axes.py": (
        "    tp: int = _ranks(",
        '    louder: int = _ranks("Ranks that multiply their gradients.", shares_data=True)\n',
    ),
    "parallel/order.py": (
        "    if layout.dp_shard == 1:\n        # Last: DDP",
        "    from paceline.parallel.louder import multiply\n\n    multiply(model, layout.louder)\n",
    ),
    "parallel/louder.py": (
        None,
        "def multiply(model, factor):\n"
        "    for each in model.parameters():\n"
        "        each.register_hook(lambda gradient: gradient * factor)\n",
    ),
}
RECIPE = """
[model]
kind = "gpt"
layers = 1
hidden = 16
heads = 2
[data]
kind = "text"
files = ["python-stdlib"]
tokenizer = "bytes"
seq_len = 16
[train]
steps = 2
global_batch_size = 8
microbatch_size = 1
eval_samples = 8
[optimizer]
kind = "adamw"
[layout]
echo = 2
spread = 2
"""
FOLLOWS = """
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.recipe import Layout, Rules, dump_recipe, load_recipe
from paceline.recipe.legal import list_candidates
from paceline.recipe.schema import LayoutSection

layout = Layout.parse("echo=2 dp_shard=3 spread=2")
assert str(layout) == "dp_replicate=auto echo=2 dp_shard=3 spread=2"
assert layout.fewest_ranks == 12
layout = layout.resolve(24)
assert list(layout.degrees.items()) == [
    ("pp", 1), ("dp_replicate", 2), ("echo", 2), ("dp_shard", 3), ("cp", 1), ("spread", 2), ("tp", 1)
]
assert (layout.num_ranks, layout.dp, layout.num_replicas, layout.num_sample_parts) == (24, 12, 4, 1)
assert layout.divides_model and layout.keeps_bits
assert layout.find_place(23) == {
    "pp": 0, "dp_replicate": 1, "echo": 1, "dp_shard": 2, "cp": 0, "spread": 1, "tp": 0, "ep": 0
}
assert [layout.find_dp_rank(rank) for rank in (0, 5, 6, 11, 12, 23)] == [0, 5, 0, 5, 6, 11]
assert layout.list_groups(["echo"])[:2] == [[0, 6], [1, 7]]
assert LayoutSection.of(layout).to_layout() == layout

try:
    Layout.parse("echo=3").resolve(4)
except PacelineError as error:
    assert "echo=3" in str(error), error
else:
    raise AssertionError("3 does not divide 4")
try:
    Layout.parse("ecco=3")
except PacelineError as error:
    assert "pp, dp_replicate, ep, echo, dp_shard, cp, spread, tp" in str(error), error

candidates = list(list_candidates(4, ("none",), ("none",)))
assert {c.num_ranks for c in candidates} == {4} and len(set(candidates)) == len(candidates)
assert sum(c.echo * c.spread == 4 for c in candidates) == 3 * 6

recipe = load_recipe(sys.argv[1], ["layout.dp_replicate=1"])
assert recipe.layout.to_layout() == Layout(dp_replicate=1, echo=2, spread=2)
assert "echo = 2" in dump_recipe(recipe)
Rules.of(recipe).refuse(recipe.layout.to_layout(), 4)
# The fewest steps of the cheapest axis come first.
near = Rules.of(recipe).nearest(Layout.parse("dp_replicate=1 echo=2"), 4)
assert str(near[0]) == "dp_replicate=1 echo=4", near
assert "torch" not in sys.modules
"""


def copy_package(folder: Path, changes: Sequence[tuple[str, str | None, str]]) -> Path:
    """Copy the package with these lines in these files, each before the line that begins so."""
    assert paceline.__file__ is not None
    shutil.copytree(
        Path(paceline.__file__).parent, folder / "paceline", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, before, lines in changes:
        path = folder / "paceline" / name
        if before is None:
            assert not path.exists()
            path.write_text(lines)
            continue
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, lines + before))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose table has two more rows, with a recipe beside it; no other line differs."""
    rows = [("recipe/axes.py", f"    {before}: int = _ranks(", row) for before, row in ROWS.items()]
    return copy_package(tmp_path_factory.mktemp("made_up"), rows)


def run_on(folder: Path, *words: str) -> str:
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_row_is_all_that_a_layout_needs(made_up: Path) -> None:
    run_on(made_up, "-c", FOLLOWS, "recipe.toml")


def test_a_row_is_all_that_training_needs(made_up: Path) -> None:
    """Ranks of made-up axes train with every bit of one process, by themselves and with the other axes."""
    layouts = ["echo=2", "dp_replicate=2 echo=2", "echo=2 spread=2", "dp_shard=2 spread=2", "spread=2 tp=2"]
    words = [word for layout in layouts for word in ("--layout", layout)]
    said = run_on(made_up, "-m", "paceline", "verify", "recipe.toml", "--steps", "2", *words)
    assert said.count("every bit the same") == 5, said
    assert "5 layouts: 5 the same as one process." in said


def test_an_axis_that_does_something_needs_three_files(tmp_path: Path) -> None:
    """Both ranks double their gradients: the bits of one process that has twice the learning rate."""
    assert len(DOES) == 3
    copy_package(tmp_path, [(name, *lines) for name, lines in DOES.items()])
    runs = {"louder=2": (2, 0.125), "dp_replicate=1": (1, 0.25), "dp_replicate=2": (2, 0.125)}
    text = RECIPE.replace("echo = 2\nspread = 2\n", "").replace('"adamw"', '"sgd"')
    (tmp_path / "recipe.toml").write_text(text)
    hashes = {}
    for layout, (ranks, lr) in runs.items():
        words = ["train.clip_norm=0", f"optimizer.lr={lr}", "optimizer.weight_decay=0"]
        sets = [word for each in words for word in ("--set", each)]
        out = str(tmp_path / layout)
        train = ["train", "recipe.toml", "--nproc", str(ranks), "--out", out]
        run_on(tmp_path, "-m", "paceline", *train, *sets, "--set", f"layout.{layout}")
        hashes[layout] = run_on(tmp_path, "-m", "paceline", "checkpoint", "hash", out).split()[0]
    assert hashes["louder=2"] == hashes["dp_replicate=1"] != hashes["dp_replicate=2"]


def test_the_table() -> None:
    assert list_axes() == ("pp", "dp_replicate", "ep", "dp_shard", "cp", "tp")
    assert list_axes(multiplies=True) == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert list_axes(shares_data=True, multiplies=True) == ("dp_replicate", "dp_shard")
    assert list_axes(shares_data=True, divides_model=False) == (OPEN,)
    assert list_axes(divides_sample=True) == ("pp", "cp", "tp")
    assert all(axis.help.endswith(".") and "\n" not in axis.help for axis in AXES)


def test_an_axis_within_another_numbers_its_neighbours() -> None:
    layout = Layout.parse("pp=2 dp_replicate=4 ep=2 tp=2").close()
    assert (layout.num_ranks, layout.dp, layout.num_replicas) == (16, 4, 4)
    assert layout.list_groups(["ep"])[:2] == [[0, 2], [1, 3]]
    assert [layout.find_place(rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    # Of the ranks of an axis around it, those at the same place hold the same.
    assert layout.list_groups(["dp_replicate"])[:2] == [[0, 4], [1, 5]]
    assert layout.list_groups(["dp_replicate", "ep"])[0] == [0, 2, 4, 6]
    assert layout.list_groups(list_axes(divides_model=True))[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert str(Layout.parse("dp_replicate=4 ep=2")) == "dp_replicate=4 ep=2"
    assert Layout.parse("ep=2").fewest_ranks == 2
    assert Layout.parse("ep=2").resolve(6).dp_replicate == 6


def test_an_axis_within_two_others_numbers_their_neighbours() -> None:
    layout = Layout.parse("dp_replicate=2 dp_shard=2 ep=4").close()
    assert layout.list_groups(["ep"]) == [[0, 1, 2, 3]]
    assert layout.list_groups(["dp_replicate", "dp_shard"]) == [[0], [1], [2], [3]]
    layout = Layout.parse("dp_shard=4 ep=2").close()
    assert layout.list_groups(["ep"]) == [[0, 1], [2, 3]]
    assert layout.list_groups(["dp_replicate", "dp_shard"]) == [[0, 2], [1, 3]]
    assert layout.list_groups(list_axes(divides_model=True)) == [[0, 1, 2, 3]]
    # Neighbours of dp_shard=3 and of ep=2 together hold one copy of everything.
    layout = Layout.parse("dp_replicate=4 dp_shard=3 ep=2").close()
    assert layout.list_groups(list_axes(divides_model=True))[0] == list(range(6))
    layout = Layout.parse("pp=2 dp_shard=2 cp=2 tp=2 ep=4").close()
    assert (layout.num_ranks, layout.dp, layout.ep_data) == (16, 2, 2)
    assert layout.list_groups(["ep"])[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.list_groups(["dp_replicate", "dp_shard"])[0] == [0]
    assert Layout.parse("cp=4 ep=2").close().list_groups(["ep"]) == [[0, 1], [2, 3]]
    assert Layout.parse("dp_shard=2 ep=2").fewest_ranks == 2
    assert Layout.parse("dp_shard=2 ep=4").fewest_ranks == 4


@pytest.mark.parametrize(
    "text",
    ["dp_replicate=2 dp_shard=2 tp=2", "dp_replicate=3 tp=2", "dp_shard=4", "pp=3 dp_replicate=2 tp=2"],
)
def test_places_and_groups(text: str) -> None:
    layout = Layout.parse(text).close()
    places = [layout.find_place(rank) for rank in range(layout.num_ranks)]
    assert places == sorted(places, key=lambda place: list(place.values()))
    assert len({tuple(place.values()) for place in places}) == layout.num_ranks
    for rank, place in enumerate(places):
        assert layout.find_dp_rank(rank) == rank // layout.tp % layout.dp
        replica = place["pp"] * layout.num_replicas + place["dp_replicate"]
        assert rank == (replica * layout.dp_shard + place["dp_shard"]) * layout.tp + place["tp"]
    assert layout.list_groups(()) == [[rank] for rank in range(layout.num_ranks)]
    assert layout.list_groups(list_axes()) == [list(range(layout.num_ranks))]
