"""`paceline plan RECIPE --cluster`: the report, and every wrong input."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import plan
from paceline.errors import PacelineError
from paceline.plan.cluster import list_processors
from paceline.plan.fit import load_fit

LLAMA = """
[model]
kind = "gpt"
layers = 32
hidden = 4096
heads = 32
ffn_hidden = 11008
tie_embeddings = false
[data]
kind = "text"
seq_len = 4096
tokenizer = "bpe"
vocab_size = 32000
[train]
steps = 100
global_batch_size = 64
microbatch_size = 1
dtype = "bf16"
reduction = "fast"
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA)
    return path


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    plan.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, words)])
    code: int = args.run(args)
    return code


def as_table(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    run(*words, "--json")
    table: dict[str, object] = json.loads(capsys.readouterr().out)
    return table


def test_a_plan_names_layout_interval_memory_and_reasons(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(llama, "--cluster", "2 nodes of 8 H100-80") == 0
    out = capsys.readouterr().out
    for words in (
        "80% interval",
        "memory when",
        "how certain",
        "dp_replicate: needs 1",
        "any ep:",
        "tokens/s",
    ):
        assert words in out, words


def test_a_layout_fits_if_the_upper_end_of_published_peaks_does(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--cluster", "8 H100-80", "--layout", "dp_shard=8 recompute=block dp_replicate=1")
    (row,) = as_table(capsys, llama, *words)["fitting"]  # type: ignore[misc]
    count = sum(row["memory_terms"].values())
    low, high = (math.exp(end) for end in load_fit()["bars"]["memory"]["0.8"])
    assert (row["memory_low_bytes"], row["memory_high_bytes"]) == pytest.approx((low * count, high * count))
    for factor, fits in ((high * 1.02, True), (high * 0.98, False), (0.98, False)):
        assert run(llama, *words, "--memory", f"{factor * count / 1e9:.3f}") == (not fits)
        out = capsys.readouterr().out
        assert f"{low * count / 1e9:.1f} to {high * count / 1e9:.1f}" in out, out
        assert ("train a step of it" in out) == (not fits and factor > 1), out


def test_what_does_not_train_is_counted_apart_and_refused_where_it_is_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "frozen.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def part():\n    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))\n"
        "    model[0].requires_grad_(False)\n    return model\n"
        "def whole():\n    return part().requires_grad_(False)\n"
        "def batch():\n    return torch.randn(2, 64)\n"
    )
    file = tmp_path / "frozen.py"
    words = ("--batch", f"{file}:batch", "--cluster", "2 H100-80")
    assert run(f"{file}:part", *words) == 0
    # 64 * 64 + 64 numbers train; as many of 4 bytes do not.
    assert "4.16k parameters and 16.2 KiB of frozen ones and buffers" in capsys.readouterr().out
    with pytest.raises(PacelineError, match="without a parameter that requires a gradient") as found:
        run(f"{file}:whole", *words)
    assert found.value.code == "PL934"


def test_one_gpu_is_too_small_for_7b_and_the_least_that_fits_is_named(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(llama, "--cluster", "1 H100-80") == 1
    out = capsys.readouterr().out
    assert "Nothing fits 85.0 GB" in out
    assert "The least that fits by doubling the nodes: " in out


def test_memory_of_a_layout_is_state_and_activations(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (llama, "--cluster", "8 H100-80", "--layout", "dp_shard=8 recompute=block dp_replicate=1")
    (row,) = as_table(capsys, *words)["fitting"]  # type: ignore[misc]
    # 6.74e9 parameters of 4 bytes, and two moments of each, on 8 ranks.
    assert row["memory_terms"]["parameters"] == pytest.approx(6.74e9 * 4 / 8, rel=0.01)
    assert row["memory_terms"]["optimizer"] == pytest.approx(6.74e9 * 8 / 8, rel=0.01)
    assert row["low_s"] < row["step_s"] < row["high_s"]


def test_faster_links_are_never_slower(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = [
        as_table(capsys, llama, "--cluster", f"4 nodes of 8 H100-80, {rate} Gbit/s")["fitting"][0]["step_s"]  # type: ignore[index]
        for rate in (25, 100, 400)
    ]
    assert times == sorted(times, reverse=True)


def test_numbers_of_nodes_are_compared(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llama, "--cluster", "4 nodes of 8 H100-80", "--scale") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["8", "16", "32"]


def test_a_plan_needs_no_torch(llama: Path) -> None:
    code = (
        "import sys; from paceline.cli.main import main; "
        f"main(['plan', {str(llama)!r}, '--cluster', '8 H100-80', '--json']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("cluster", "code", "words"),
    [
        ("foo", "PL930", "'foo'"),
        ("", "PL930", "''"),
        ("8 nodes of H100", "PL930", "8 nodes of H100"),
        ("2 nodes of 8 H100, 3 parsec", "PL930", "'parsec'"),
        ("8 nodes of 8 H100-8", "PL931", "Did you mean h100-80?"),
        ("8 XYZ", "PL931", "'XYZ'"),
        ("2 nodes of 8 H100, 1.2.3 Gbit/s", "PL930", "1.2.3"),
        ("0 nodes of 8 A100", "PL932", "nodes: 0"),
        ("2 nodes of 0 A100", "PL932", "ranks per node: 0"),
        ("-2 nodes of 8 A100", "PL932", "nodes: -2"),
        ("2 nodes of 8 A100, 0 Gbit/s", "PL932", "Gbit/s: 0"),
        ("2 nodes of 8 A100, -3 GB/s", "PL932", "GB/s: -3"),
        ("2 nodes of 8 H100, 900 GB/s", "PL932", "If it is 900 Gbit/s"),
        # Below what NVLink has, and eight times the fastest card.
        ("2 nodes of 8 H100, 400 GB/s", "PL932", "If it is 400 Gbit/s"),
        ("nowhere.toml", "PL933", "nowhere.toml"),
    ],
)
def test_a_wrong_cluster_is_refused(llama: Path, cluster: str, code: str, words: str) -> None:
    with pytest.raises(PacelineError) as found:
        run(llama, f"--cluster={cluster}")
    assert found.value.code == code
    assert words in str(found.value)


INSIDE = "[inside]\nalpha_s = 1e-5\nbytes_per_s = 1e9"
CLUSTER = {
    "end": "[end]\ncomplete = true", "nodes": "2", "ranks_per_node": "2",
    "inside": INSIDE,
    "between": "[between]\nalpha_s = 1e-4\nbytes_per_s = 1e8",
    "processor": '[processor]\nname = "cpu"\nmemory_bytes = 1e10\nmemory_bytes_per_s = 1e10\ncall_s = 1e-5\n'
    "products = [[64.0, 64.0, 64.0, 4, 1e10], [64.0, 64.0, 64.0, 2, 1e10]]",
}  # fmt: skip


def write_product(row: str) -> str:
    return CLUSTER["processor"].replace("64.0, 64.0, 64.0, 4, 1e10", row)


def write_cluster(path: Path, **changed: str | None) -> Path:
    table = {key: value for key, value in (CLUSTER | changed).items() if value is not None}
    flat = [f"{key} = {value}" for key, value in table.items() if not value.startswith("[")]
    path.write_text("\n".join([*flat, *(value for value in table.values() if value.startswith("["))]))
    return path


def test_a_probed_cluster_is_planned_for(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_cluster(tmp_path / "cluster.toml")
    table = as_table(capsys, "recipes/gpt-stdlib.toml", "--cluster", path)
    assert table["ranks"] == 4
    assert table["fitting"]


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"end": None}, "PL933", "did not finish"),
        ({"between": None}, "PL933", "[between] is missing"),
        ({"inside": None}, "PL933", "[inside] is missing"),
        ({"nodes": None}, "PL933", "nodes is missing"),
        ({"nodes": '"two"'}, "PL933", "nodes is 'two'"),
        ({"processor": "[processor]\nmemory_bytes = 1e10"}, "PL933", "`products`"),
        ({"between": "[between]\nalpha_s = 1e-4\nbytes_per_s = 0"}, "PL932", "between.bytes_per_s: 0"),
        ({"between": "[between]\nalpha_s = -1e-4\nbytes_per_s = 1e8"}, "PL932", "between.alpha_s: -0.0001"),
        ({"inside": "[inside]\nalpha_s = 1e-4\nbytes_per_s = nan"}, "PL932", "inside.bytes_per_s: nan"),
        ({"nodes": "2 2"}, "PL933", "cannot be read"),
        ({"ranks_per_node": "2.5"}, "PL933", "ranks_per_node is 2.5"),
        ({"inside": INSIDE + "\nall_reduce = 5"}, "PL933", "inside.all_reduce is 5"),
        (
            {"processor": write_product("64.0, 4")},
            "PL933",
            "[64.0, 4]",
        ),
        (
            {"processor": write_product("64.0, 64.0, 64.0, 4, 1e10") + "\nattention = [[128.0, 16.0]]"},
            "PL933",
            "attention has [128.0, 16.0]",
        ),
        (
            {"processor": write_product("'a', 64.0, 64.0, 4, 1e10")},
            "PL933",
            "'a'",
        ),
        (
            {"processor": write_product("0, 64.0, 64.0, 4, 1e10")},
            "PL932",
            ": 0.",
        ),
        (
            {"inside": INSIDE + "\nall_reduce = { bytes_per_s = 1 }"},
            "PL933",
            "empty_s is missing",
        ),
        (
            {"inside": INSIDE + "\nall_reduce = { empty_s = -1, bytes_per_s = 1 }"},
            "PL932",
            "empty_s: -1",
        ),
        ({"inside": INSIDE + "\nranks = 'two'"}, "PL933", "inside.ranks is 'two'"),
        ({"end": "[end]\ncomplete = true\n[step]\nother_s = 'long'"}, "PL933", "step.other_s is 'long'"),
        ({"end": "[end]\ncomplete = true\n[step]\nother_s = -4"}, "PL932", "step.other_s: -4"),
    ],
)
def test_a_wrong_cluster_file_is_refused(
    llama: Path, tmp_path: Path, changed: dict[str, str | None], code: str, words: str
) -> None:
    with pytest.raises(PacelineError) as found:
        run(llama, "--cluster", write_cluster(tmp_path / "cluster.toml", **changed))
    assert found.value.code == code
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--nproc", 12), "PL936"),
        (("--nproc", 0), "PL936"),
        (("--nproc", 128), "PL936"),
        (("--memory", -4), "PL932"),
        (("--memory", "nan"), "PL932"),
        (("--vocab-size", 0), "PL932"),
        (("--layout", "tp=8 pq=2"), "PL110"),
        (("--layout", "tp=3"), "PL113"),
        (("--calibrate", "nowhere"), "PL935"),
        (("--set", "model.layer=3"), "PL100"),
    ],
)
def test_wrong_words_are_refused(llama: Path, words: tuple[object, ...], code: str) -> None:
    with pytest.raises(PacelineError) as found:
        run(llama, "--cluster", "8 nodes of 8 H100", *words)
    assert code in str(found.value)


def test_more_nodes_are_tried_only_as_long_as_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    # The libraries alone need more, on any number of nodes.
    assert run("recipes/gpt-stdlib.toml", "--cluster", "2 nodes of 2 H100", "--memory", 0.1) == 1
    out = capsys.readouterr().out
    assert "Nothing fits 0.1 GB" in out
    assert "by doubling the nodes" not in out


def test_a_target_that_is_neither_recipe_nor_function_is_refused() -> None:
    with pytest.raises(PacelineError) as found:
        run("no.such", "--cluster", "8 H100")
    assert found.value.code == "PL934"


def write_run(folder: Path, recipe: str, rows: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_run_narrows_the_interval(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = LLAMA + "[layout]\ndp_shard = 8\ndp_replicate = 1\nrecompute = 'block'\n"
    folder = write_run(tmp_path / "run", recipe, [{"step_s": 20.0, "comm_s": 1.0}] * 20)
    words = (llama, "--cluster", "8 H100-80", "--layout", "dp_shard=8 dp_replicate=1 recompute=block")
    assert run(*words, "--calibrate", folder) == 0
    out = capsys.readouterr().out
    assert "measured 20.0 s per step" in out
    assert "Most of the error is in computing" in out
    (row,) = as_table(capsys, *words, "--calibrate", folder)["fitting"]  # type: ignore[misc]
    assert row["step_s"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("recipe", "rows", "words"),
    [
        (LLAMA, 4, "1 steps after the first 3"),
        (LLAMA, "long", "0 steps after the first 3"),
        (LLAMA, math.inf, "0 steps after the first 3"),
        (LLAMA.replace("layers = 32", "layers = 16"), 20, "its model has"),
        (LLAMA.replace("seq_len = 4096", "seq_len = 2048"), 20, "samples of 2048 tokens"),
        (LLAMA.replace('"bf16"', '"fp32"'), 20, "numbers of 4 bytes"),
        (LLAMA + "[layout]\ndp_shard = 64\ndp_replicate = 1\n", 20, "it had 64 ranks"),
    ],
)
def test_a_run_of_something_else_does_not_calibrate(
    llama: Path, tmp_path: Path, recipe: str, rows: object, words: str
) -> None:
    steps = [{"step_s": 1.0}] * rows if isinstance(rows, int) else [{"step_s": rows}] * 20
    folder = write_run(tmp_path / "run", recipe, steps)
    with pytest.raises(PacelineError) as found:
        run(llama, "--cluster", "8 H100", "--calibrate", folder)
    assert found.value.code == "PL935"
    assert words in str(found.value)


def test_a_recording_of_one_rank_is_refused_and_one_of_two_is_projected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.plan_recorded import read_step
    from paceline.profiling.analysis import Profile, RankStep, Traffic

    traffic = (Traffic("world", "all_reduce", 4, 4_000_000, 8_000_000),)
    times = (50_000_000, {"backward": 20_000_000}, 40_000_000, 8_000_000, 5_000_000, {}, 4_000_000)
    steps = [RankStep(rank, number, *times, traffic) for rank in (0, 1) for number in (1, 2, 3)]
    both = Profile(2, (0, 1), (1, 2, 3), tuple(steps), (), 4, 0, 0, 0, None)
    step = read_step(both, tmp_path)
    assert (step.num_ranks, step.work_s, step.backward_s) == (2, 0.045, 0.02)
    assert (step.calls[0].num_bytes, step.calls[0].times, step.backward_share) == (1_000_000, 4, 0.5)
    alone = Profile(
        1, (0,), (1,), (steps[0].__class__(0, 1, 5, {}, 5, 0, 0, {}, 0, ()),), (), 0, 0, 0, 0, None
    )
    with pytest.raises(PacelineError) as found:
        read_step(alone, tmp_path)
    assert found.value.code == "PL940"


def test_what_a_plan_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes/gpt-stdlib.toml", "--cluster", "2 H100-80") == 0
    assert "the exact reduction is planned as two sums" in capsys.readouterr().out


def test_a_plan_without_a_cluster_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError) as found:
        run(llama)
    assert found.value.code == "PL930"


def test_wider_numbers_are_never_computed_faster(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in list_processors():
        times = []
        for dtype in ("bf16", "fp32", "fp64"):
            words = (llama, "--set", f"train.dtype={dtype}", "--cluster", f"8 {name}", "--memory", 4000)
            table = as_table(capsys, *words, "--layout", "dp_replicate=8")
            times.append(table["fitting"][0]["terms_s"]["compute"])  # type: ignore[index]
        assert times == sorted(times), name


@pytest.mark.parametrize(
    "words",
    [
        ("recipes/gpt-stdlib.toml", "--batch", "a:b"),
        ("recipes/gpt-stdlib.toml", "--global-batch", 8),
        ("a.py:build", "--batch", "a.py:batch", "--set", "model.layers=2"),
        ("a.py:build", "--batch", "a.py:batch", "--vocab-size", 32),
        ("train.py", "--recorded", "profile-1", "--layout", "tp=2"),
        ("train.py", "--recorded", "profile-1", "--memory", 3),
        ("recipes/gpt-stdlib.toml", "--scale", "--layout", "tp=2"),
    ],
)
def test_an_option_without_effect_is_refused(words: tuple[object, ...]) -> None:
    with pytest.raises(PacelineError) as found:
        run(*words, "--cluster", "8 H100")
    assert found.value.code == "PL941"


def test_what_a_plan_must_be_told_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(LLAMA.replace('"bpe"\nvocab_size = 32000', '"tokenizer.json"'))
    for words, code in (((str(recipe),), "PL928"), (("model.py:build",), "PL939")):
        with pytest.raises(PacelineError) as found:
            run(*words, "--cluster", "8 H100-80")
        assert found.value.code == code
