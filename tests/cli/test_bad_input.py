"""Mistakes with `paceline train`: the message has the value, the rule and the next move.

Each case is a real command in a process of its own group, with exit code 2, no traceback, and nothing
written or lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.checkpoint.manifest import dump_manifest, read_manifest

RECIPE = """
[model]
kind = "gpt"
layers = 1
hidden = 16
heads = 2
[data]
kind = "text"
files = ["text/*.txt"]
seq_len = 16
cache_dir = "cache"
[train]
steps = 4
global_batch_size = 4
microbatch_size = 2
[optimizer]
kind = "adamw"
[checkpoint]
every = 2
"""


@dataclass
class Case:
    """One mistake.

    Attributes:
        words: arguments after `paceline`.
        says: patterns that the message must hold: the value, the rule, the next move, the code.
        before: makes the mistake in the folder.
        environ: more environment variables.
        starts_ranks: whether it can only be seen by ranks, which takes seconds.
    """

    words: list[str]
    says: list[str]
    before: Callable[[Path], None] = lambda folder: None
    environ: dict[str, str] = field(default_factory=dict)
    json: bool = False


def _train(*words: str) -> list[str]:
    return ["train", "recipe.toml", "--out", "out", *words]


def _set(*settings: str) -> list[str]:
    return _train(*(word for setting in settings for word in ("--set", setting)))


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _as_a_folder(folder: Path) -> None:
    (folder / "recipe.toml").unlink()
    (folder / "recipe.toml").mkdir()


CASES = {
    "recipe missing": Case(
        ["train", "recipes.toml"], ["recipes.toml does not exist", "recipe.toml", "PL121"]
    ),
    "recipe unreadable": Case(_train(), ["cannot be read", "PL121"], before=_as_a_folder),
    "recipe not utf-8": Case(_train(), ["UTF-8", "PL121"], before=_write("recipe.toml", b"\xff\xfe=1")),
    "recipe not toml": Case(
        _train(), ["not TOML", "line 1", "PL122"], before=_write("recipe.toml", "model kind")
    ),
    "unknown key": Case(_set("train.step=3"), ["train.step", '"steps"', "PL100"]),
    "unknown section": Case(_set("trian.steps=3"), ["trian", '"train"', "PL100"]),
    "missing section": Case(
        _train(),
        ["train", "missing", "PL101"],
        before=_write("recipe.toml", '[model]\nkind="gpt"\n[data]\nkind="text"\n'),
    ),
    "wrong type": Case(_set("train.steps=many"), ["train.steps", "many", "integer", "PL101"]),
    "zero": Case(_set("model.layers=0"), ["model.layers=0", "greater than 0", "PL101"]),
    "negative": Case(_set("train.global_batch_size=-4"), ["global_batch_size=-4", "greater than 0", "PL101"]),
    "not a number": Case(_set("optimizer.lr=nan"), ["optimizer.lr", "PL101"]),
    "unknown kind": Case(_set("model.kind=gtp"), ["gtp", "gpt", "encoder", "resnet", "PL101"]),
    "heads not dividing hidden": Case(
        _set("model.heads=3"), ["heads=3", "hidden=16", "1 or 2 or 4", "PL102"]
    ),
    "model without its data": Case(_set("model.kind=encoder"), ["encoder", "text", "masked_text"]),
    "two problems at once": Case(
        _set("model.layers=0", "train.seed=-1"), ["2 problems", "model.layers=0", "train.seed=-1"]
    ),
    "malformed setting": Case(_set("train.steps"), ["train.steps", "key=value", "PL123"]),
    "microbatch over batch": Case(
        _set("train.microbatch_size=8"), ["microbatch_size=8", "global_batch_size=4", "PL108"]
    ),
    "steps and epochs": Case(_set("train.epochs=1"), ["train.steps", "train.epochs", "PL107"]),
    "layout of another size": Case(
        _train("--nproc", "2", "--set", "layout.dp_replicate=3"), ["dp_replicate=3", "2 ranks", "PL113"]
    ),
    "experts of a dense model": Case(_set("layout.ep=2"), ["layout.ep=2", "without experts", "PL653"]),
    "no files match": Case(_set('data.files=["nowhere/*.txt"]'), ["nowhere", "PL2"]),
    "data too short": Case(_set("data.seq_len=100000"), ["100000", "tokens", "PL2"]),
    "tokenizer missing": Case(_set("data.tokenizer=tok.json"), ["tok.json", "PL2"]),
    "out is a file": Case(_train(), ["out", "cannot be", "--out", "PL532"], before=_write("out", "a file")),
    "no ranks": Case(_train("--nproc", "0"), ["nproc=0", "at least 1", "PL320"]),
    "too many ranks": Case(_train("--nproc", "5000"), ["5000", "cores", "PL321"]),
    "no gpu": Case(_set("train.device=cuda"), ["cuda", "PL3"]),
    "unknown device": Case(_set("train.device=tpu"), ["tpu", "'cpu'", "PL101"]),
    "half an environment": Case(_train(), ["RANK", "WORLD_SIZE", "PL300"], environ={"RANK": "0"}),
    "rank out of range": Case(
        _train(),
        ["RANK=5", "WORLD_SIZE=2"],
        environ={
            "RANK": "5",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "5",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        },
    ),
    "unknown command": Case(["trian"], ["trian", "Did you mean train", "PL600"]),
    "unknown flag": Case(_train("--nprocs", "2"), ["--nprocs", "--nproc", "PL600"]),
    "nproc not a number": Case(_train("--nproc", "two"), ["two", "--nproc", "PL600"]),
    "as json": Case([*_set("model.layers=0"), "--json"], ["PL101"], json=True),
}


def fill(folder: Path) -> Path:
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text("nobody is dropped, " * 40 + str(number))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def paceline(
    folder: Path, *words: str, timeout_s: float = 60, **environ: str
) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env=variables | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_told(done: subprocess.CompletedProcess[str], says: list[str]) -> None:
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Traceback" not in text
    for pattern in says:
        assert pattern in text, f"{pattern!r} is not in: {text}"
    codes = set(re.findall(r"PL\d{3}", text))
    assert len(codes) <= 2, text


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_reported_and_nothing_is_written(name: str, folder: Path) -> None:
    case = CASES[name]
    case.before(folder)
    before = snapshot(folder)
    done = paceline(folder, *case.words, **case.environ)
    check_told(done, case.says)
    if case.json:
        assert json.loads(done.stdout)["error"]["code"] == case.says[0]
    after = {path: data for path, data in snapshot(folder).items() if not path.startswith("cache/")}
    assert after == before


# ---- mistakes around a run that exists


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; whoever wants to spoil it takes a copy, `trained`."""
    folder = fill(tmp_path_factory.mktemp("finished"))
    done = paceline(folder, *_train())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def trained(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    return tmp_path


def checkpoint_hash(folder: Path) -> str:
    done = paceline(folder, "checkpoint", "hash", "out")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_recipe_into_a_runs_folder(trained: Path) -> None:
    before = snapshot(trained)
    done = paceline(trained, *_set("model.hidden=32"))
    check_told(done, ["model.hidden: 16 there, 32 here", "--out", "PL530"])
    assert snapshot(trained) == before


def test_altered_and_truncated_checkpoints(trained: Path) -> None:
    newest, older = trained / "out/checkpoints/step-00000004", trained / "out/checkpoints/step-00000002"
    data = bytearray((newest / "part-00000.safetensors").read_bytes())
    data[-3] ^= 1
    (newest / "part-00000.safetensors").write_bytes(data)
    done = paceline(trained, *_set("train.steps=6"))
    assert done.returncode == 0, done.stderr
    assert "part-00000.safetensors" in done.stderr
    assert "resuming after step 2 of " in done.stderr

    for path in [*(trained / "out/checkpoints").glob("step-*/part-00000.safetensors")]:
        path.write_bytes(path.read_bytes()[:100])
    before = snapshot(trained / "out/checkpoints")
    done = paceline(trained, *_set("train.steps=6"))
    check_told(done, ["part-00000.safetensors"])
    assert snapshot(trained / "out/checkpoints") == before
    assert older.exists()


def test_checkpoint_of_a_newer_version(trained: Path) -> None:
    for path in (trained / "out/checkpoints").glob("step-*/manifest.json"):
        path.write_bytes(dump_manifest(read_manifest(path.parent), format_version=99))
    before = snapshot(trained / "out/checkpoints")
    done = paceline(trained, *_set("train.steps=6"))
    check_told(done, ["99"])
    assert snapshot(trained / "out/checkpoints") == before


def test_checkpoint_of_another_model(trained: Path) -> None:
    other = paceline(trained, "train", "recipe.toml", "--out", "other", "--set", "model.layers=2")
    assert other.returncode == 0, other.stderr
    shutil.rmtree(trained / "out/checkpoints")
    shutil.copytree(trained / "other/checkpoints", trained / "out/checkpoints")
    before = snapshot(trained / "out/checkpoints")
    done = paceline(trained, *_train())
    check_told(done, ["another model", "PL531"])
    assert snapshot(trained / "out/checkpoints") == before


def test_two_runs_into_one_folder(folder: Path) -> None:
    words = _set("train.steps=100000", "checkpoint.every=100000")
    first = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 40
        while not (folder / "out/metrics.jsonl").exists():
            assert time.monotonic() < deadline, "the first run did not start"
            time.sleep(0.1)
        check_told(paceline(folder, *words), ["in use", "--out", "PL533"])
    finally:
        first.terminate()
        _, told = first.communicate(timeout=60)
    assert first.returncode == 75, told
    assert "stopped by SIGTERM" in told
    assert checkpoint_hash(folder)


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_disk_full_during_a_save(folder: Path, small_disk: Path) -> None:
    words = [
        "train",
        "recipe.toml",
        "--out",
        "disk/out",
        "--set",
        "model.hidden=32",
        "--set",
        "metrics.sinks=[]",
    ]
    done = paceline(folder, *words, "--nproc", "2")
    check_told(done, ["disk", "PL5"])
    left = list((small_disk / "out/checkpoints").glob("step-*"))
    for path in left:  # whatever was committed before the disk was full is whole
        assert paceline(folder, "checkpoint", "verify", str(path)).returncode == 0


def two_ranks(port: str) -> dict[str, str]:
    """Return the environment of the first of two ranks."""
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_port_taken(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = paceline(
            folder,
            *_set("train.timeout_s=5"),
            **two_ranks(port),
        )
    check_told(done, [port, "PL3"])


def test_ranks_that_never_come(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = paceline(
        folder,
        *_set("train.timeout_s=2"),
        **two_ranks(port),
    )
    check_told(done, [port, "PL3"])


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_loss_that_is_not_a_number(nproc: str, folder: Path) -> None:
    words = _set(
        "optimizer.lr=1e30",
        "train.max_skipped_in_a_row=3",
        "train.steps=50",
        "train.clip_norm=0",
        "checkpoint.every=1",
    )
    done = paceline(folder, *words, "--nproc", nproc)
    check_told(done, ["3 steps in a row", "max_skipped_in_a_row", "PL431"])
    assert checkpoint_hash(folder)


def test_out_of_memory(folder: Path) -> None:
    words = _set(
        "model.hidden=512",
        "train.global_batch_size=40000",
        "train.microbatch_size=40000",
        'data.files=["big.txt"]',
        "train.steps=1",
    )
    (folder / "big.txt").write_bytes(b"nobody is dropped, " * 60000)
    limited = ["bash", "-c", 'ulimit -v 4500000; exec "$@"', "bash"]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    check_told(done, ["memory", "microbatch_size", "PL432"])
