"""`paceline checkpoint`: what it prints and how it ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.checkpoint import CheckpointFolder, find_checkpoint, hash_tensors
from paceline.cli.checkpoint import register
from paceline.errors import PacelineError
from tests.checkpoint.states import make_model, save


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = CheckpointFolder(tmp_path / "run", keep=3)
    for step in (50, 100):
        save(folder, step)
    return tmp_path / "run"


def call(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="paceline")
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", *map(str, words)])
    code = args.run(args)
    assert isinstance(code, int)
    return code


def break_newest(run_folder: Path) -> Path:
    path = run_folder / "checkpoints" / "step-00000100" / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_registering_does_not_import_torch() -> None:
    script = (
        "import argparse, sys; from paceline.cli.checkpoint import register;"
        "register(argparse.ArgumentParser().add_subparsers()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_show_for_people(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", run_folder, "--tensors") == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["step", "size", "tensors", "parameters", "loss", "folder"]
    assert lines[1].split()[0] == "50"
    row = lines[2].split()
    assert (row[0], row[3], row[4], row[5]) == ("100", "3", "259", "14.2857")
    assert "threads_per_rank  1" in printed
    assert "head.weight   F32   [64, 4]  (tied to embed.weight)" in printed


def test_show_for_machines(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", run_folder / "checkpoints" / "step-00000050", "--json", "--tensors") == 0
    (shown,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (shown["step"], shown["num_tensors"], shown["num_parameters"]) == (50, 3, 259)
    assert shown["loss"] == 50 / 7
    assert shown["bytes"] == sum(path.stat().st_size for path in Path(shown["path"]).iterdir())
    assert shown["tensors"]["head.weight"] == {"dtype": "F32", "shape": [64, 4], "alias_of": "embed.weight"}
    assert shown["identity"]["torch"] == "2.13.0"
    assert shown["findings"] == []


def test_show_of_a_broken_one(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("manifest.json", "part-00000.safetensors", "state.json"):
        (run_folder / "checkpoints" / "step-00000100" / name).write_text("{")
    assert call("show", run_folder) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("?")
    assert "manifest.json was altered" in printed


def test_verify(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", run_folder) == 0
    assert capsys.readouterr().out.count("valid, every hash is right") == 2
    path = break_newest(run_folder)
    assert call("verify", run_folder) == 1
    printed = capsys.readouterr().out
    assert "step-00000050: valid" in printed
    assert "step-00000100: not valid" in printed
    assert "part-00000.safetensors was altered" in printed
    assert call("verify", run_folder, "--json") == 1
    shown = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [table["usable"] for table in shown] == [True, False]
    assert shown[1]["findings"][0]["code"] == "PL502"
    assert shown[1]["findings"][0]["where"] == str(path)


def test_verify_reports_of_a_file_beside_it(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints" / "step-00000100" / "notes.txt").write_text("mine")
    assert call("verify", run_folder) == 1
    assert "step-00000100: valid, with other files beside it" in capsys.readouterr().out


def test_hash_of_a_run_and_of_one(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("hash", run_folder) == 0
    assert capsys.readouterr().out == hash_tensors(make_model(100)) + "\n"
    assert call("hash", run_folder / "checkpoints" / "step-00000050", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["sha256"]) == (50, hash_tensors(make_model(50)))


def test_hash_falls_back_aloud(
    run_folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = break_newest(run_folder)
    assert call("hash", run_folder) == 0
    assert capsys.readouterr().out == hash_tensors(make_model(50)) + "\n"
    assert str(path) in caplog.text
    with pytest.raises(PacelineError) as caught:
        call("hash", path.parent)
    assert caught.value.code == "PL502"


@pytest.mark.parametrize("words", [("hash",), ("export", "model.safetensors")])
def test_a_checkpoint_that_goes_away_meanwhile(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A run that trains removes old checkpoints, also between the check and the reading."""

    def find_and_remove(path: Path) -> Path:
        found = find_checkpoint(path)
        (found / "manifest.json").unlink()
        return found

    monkeypatch.setattr("paceline.checkpoint.find_checkpoint", find_and_remove)
    with pytest.raises(PacelineError, match=r"manifest\.json is missing.*PL506"):
        call(words[0], run_folder, *(run_folder / word for word in words[1:]))


def test_export(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.safetensors"
    assert call("export", run_folder, out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert hash_tensors(load_file(out)) == hash_tensors(make_model(100))
    assert call("export", run_folder, tmp_path / "half.safetensors", "--dtype", "bf16", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes"] == (tmp_path / "half.safetensors").stat().st_size
    with pytest.raises(PacelineError) as caught:
        call("export", run_folder, out)
    assert caught.value.code == "PL513"


@pytest.mark.parametrize("action", ["show", "verify", "hash"])
def test_a_path_without_checkpoints(action: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        call(action, tmp_path)
    assert caught.value.code == "PL514"
