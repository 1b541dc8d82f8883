"""Checks that come before any rank starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.data import prepare_data
from paceline.data.prepare import PreparedText
from paceline.errors import PacelineError
from paceline.recipe import Recipe, parse_recipe

# Batches that the smallest of these texts fill.
SMALL = {"global_batch_size": 1, "microbatch_size": 1}


def text_recipe(tmp_path: Path, **keys: Any) -> Recipe:
    data = {"kind": "text", "files": [f"{tmp_path}/*.txt"], "cache_dir": str(tmp_path / "cache")} | keys
    return parse_recipe({"model": {"kind": "gpt"}, "data": data, "train": {"steps": 1} | SMALL})


def test_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text, and a cat\n" * 100)
    script = f"""
import sys
from paceline.data import prepare_data
from paceline.recipe import parse_recipe
def prepare(model, data):
    prepare_data(parse_recipe({{"model": {{"kind": model}}, "data": data, "train": {{"steps": 1}}}}))
text = {{"kind": "text", "files": ["{tmp_path}/*.txt"], "cache_dir": "{tmp_path}/cache", "seq_len": 16}}
prepare("gpt", text)
prepare("gpt", text | {{"tokenizer": "bpe", "vocab_size": 260}})
prepare("resnet", {{"kind": "digits"}})
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("False\n", "")


def test_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 101)
    prepared = prepare_data(text_recipe(tmp_path, seq_len=20, valid_fraction=0))
    assert isinstance(prepared, PreparedText)
    assert prepared.num_samples(prepared.corpus.train) == 5
    (tmp_path / "a.txt").write_text("x" * 100)  # the last sample lacks a target
    prepared = prepare_data(text_recipe(tmp_path, seq_len=20, valid_fraction=0))
    assert isinstance(prepared, PreparedText)
    assert prepared.num_samples(prepared.corpus.train) == 4


@pytest.mark.parametrize(
    ("seq_len", "valid_fraction", "part", "num_tokens"),
    [
        (200, 0.0, "training", 200),
        (90, 0.7, "training", 60),
        (30, 0.1, "validation", 20),
        (8, 0.001, "validation", 0),
    ],
)
def test_too_short(tmp_path: Path, seq_len: int, valid_fraction: float, part: str, num_tokens: int) -> None:
    (tmp_path / "a.txt").write_text("x" * 200)
    with pytest.raises(PacelineError) as caught:
        prepare_data(text_recipe(tmp_path, seq_len=seq_len, valid_fraction=valid_fraction))
    error = caught.value
    assert error.code == "PL202"
    assert f"the {part} part" in error.saw
    assert f"has {num_tokens} tokens" in error.saw
    assert f"needs {seq_len + 1}" in error.rule
    if num_tokens > 1:
        assert f"data.seq_len={num_tokens - 1} or less" in error.fix
    else:
        assert "seq_len" not in error.fix


def test_the_longest_sequence_that_the_message_names_fits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 200)
    prepare_data(text_recipe(tmp_path, seq_len=199, valid_fraction=0))


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"files": ["/nowhere/*.txt"]}, "PL200"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, "PL203"),
        ({"cache_dir": "/dev/null/cache"}, "PL204"),
        ({"tokenizer": "bpe", "vocab_size": 5000}, "PL206"),
    ],
)
def test_other_mistakes(tmp_path: Path, keys: dict[str, Any], code: str) -> None:
    (tmp_path / "a.txt").write_text("x" * 500)
    with pytest.raises(PacelineError, match=code):
        prepare_data(text_recipe(tmp_path, **keys))


def test_home_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x" * 500)
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_data(text_recipe(tmp_path, files=["~/a.txt"], cache_dir="~/kept", seq_len=8))
    assert (tmp_path / "kept").is_dir()
