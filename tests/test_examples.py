"""The examples run, on one rank and on three, and report the same; plain DDP runs under both launchers."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launching.local import launch

ROOT = Path(__file__).parent.parent
PLAIN = ROOT / "examples" / "ddp.py"
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path != PLAIN)


def run_example(path: Path, folder: Path, nproc: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(path.parent))
    launch(importlib.import_module(path.stem).main, nproc, log_dir=folder)
    lines = (folder / "rank-0000.log").read_text(encoding="utf-8").splitlines()
    # One rank has more cores to itself than three have, and is told that it uses one of them.
    return [line for line in lines if "CPU thread per rank" not in line]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_reports_the_same_on_one_rank_and_on_three(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_example(path, tmp_path / "one", 1, monkeypatch)
    together = run_example(path, tmp_path / "three", 3, monkeypatch)
    assert len(alone) >= 3
    assert len(alone) == len(together)
    for one, three in zip(alone, together, strict=True):
        numbers = r"-?\d+\.\d+(?:e[-+]\d+)?"
        assert re.sub(numbers, "#", one) == re.sub(numbers, "#", three)
        ours, theirs = (list(map(float, re.findall(numbers, line))) for line in (one, three))
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_plain_example_trains_alike_under_both_launchers() -> None:
    """The example knows nothing of Paceline, so torchrun is the truth."""
    assert "paceline" not in PLAIN.read_text(encoding="utf-8").split('"""')[2]
    printed = []
    for launcher in (["-m", "paceline", "run"], ["-m", "torch.distributed.run"]):
        command = [sys.executable, *launcher, "--nproc-per-node", "2", str(PLAIN), "--epochs", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        if (
            "torch.distributed.run" in launcher
            and "terminate called without an active exception" in done.stderr
        ):
            # torch's thread for gloo sometimes aborts a process that ends; `paceline run` waits for it.
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    first, *_, last = re.findall(r"loss (\d\.\d+)", printed[0])
    assert float(last) < 0.8 * float(first)
