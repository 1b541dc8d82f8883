"""`paceline train --nnodes`: what it hands on to `paceline run`, and what it refuses before ranks start."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.checkpoint import find_checkpoint
from paceline.checkpoint.manifest import read_manifest
from paceline.cli import run
from paceline.cli.main import main
from paceline.launching.members import common_disk
from tests.launching.launched import Launched, paceline_run
from tests.launching.test_meeting import free_port
from tests.train.cases import text_recipe

RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "gpt-stdlib.toml")


def test_it_is_a_run_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "run", lambda args: seen.append(args) or 75)
    words = ["--nnodes", "1:4", "--nproc", "2", "--rdzv-endpoint", "node0", "--max-restarts", "0"]
    more = [
        "--set",
        "train.steps=5",
        "--accept",
        "data",
        "--out",
        "runs/a",
        "--no-watch",
        "--hang-after",
        "9",
        "--detect-s",
        "4",
        "--join-timeout",
        "50",
    ]
    assert main(["train", RECIPE, *words, *more]) == 75
    (args,) = seen
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_endpoint) == (
        "1:4",
        "2",
        "c10d",
        "node0",
    )
    assert (args.rdzv_id, args.max_restarts, args.no_watch, args.hang_after) == ("gpt-stdlib", 0, True, 9)
    assert (args.detect_s, args.join_timeout) == (4, 50)
    train = ["train", RECIPE, "--out", "runs/a", "--set", "train.steps=5", "--accept", "data"]
    assert (args.module, args.training_script, args.training_script_args) == (True, "paceline", train)


@pytest.mark.parametrize(
    ("words", "meeting"),
    [
        ([], ("folder", "runs/a/.rendezvous")),
        (["--rdzv-endpoint", "node0"], ("c10d", "node0")),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd0"], ("etcd", "etcd0")),
    ],
)
def test_nodes_meet_in_a_run_folder_of_the_network(
    words: list[str], meeting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "run", lambda args: seen.append(args) or 0)
    monkeypatch.setattr(common_disk, "find_network_disk", lambda folder: f"nfs4: of {folder}")
    assert main(["train", RECIPE, "--nnodes", "1:2", "--out", "runs/a", *words]) == 0
    assert (seen[0].rdzv_backend, seen[0].rdzv_endpoint) == meeting


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--nnodes", "1:2"], "PL607", "--nnodes 1:2 without --rdzv-endpoint"),
        (["--rdzv-endpoint", "node0"], "PL607", "--rdzv-endpoint node0 without --nnodes"),
        (["--detect-s", "4"], "PL607", "--detect-s 4.0 without --nnodes"),
        (["--max-restarts", "0"], "PL607", "--max-restarts 0 without --nnodes"),
        (["--nnodes", "3:2", "--rdzv-endpoint", "node0"], "PL365", "--nnodes 3:2"),
        (["--nnodes", "2:3", "--rdzv-endpoint", "node0", "--set", "layout.tp=2"], "PL113", "3 ranks"),
        (
            ["--nnodes", "1:3", "--rdzv-endpoint", "node0", "--set", 'elastic.layouts=["tp=2"]'],
            "PL129",
            "1 rank ",
        ),
    ],
)
def test_refused(words: list[str], code: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", RECIPE, *words]) == 2
    error = capsys.readouterr().err
    assert f"[{code}]" in error
    assert told in error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_train(tmp_path: Path) -> None:
    recipe = text_recipe(tmp_path / "text") | {"layout": {"dp_shard": "auto"}}
    lines = []
    for section, table in recipe.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    command = [paceline_run()[0], "train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]
    command += ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Launched(tmp_path / name, command)) for name in ("first", "second")]
        assert [job.wait(200) for job in jobs] == [0, 0], "\n".join(job.text for job in jobs)
    identity = read_manifest(find_checkpoint(tmp_path / "run")).identity
    assert identity["layout"] == "dp_replicate=1 dp_shard=2"
