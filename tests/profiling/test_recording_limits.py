"""What a recording does without: steps that torch does not keep, a request that is none, room on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.launching.rank.requests import REQUEST, follow_request
from paceline.memory.steps import StepMemory
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.rank.recording import count_steps_that_fit
from paceline.torch_seams.watching import BUFFER_SIZES


@pytest.mark.parametrize(
    ("size", "num_calls", "num_steps"),
    [("1000", 30, 32), ("1000", 600, 1), ("1000", 0, sys.maxsize), ("many", 30, sys.maxsize)],
)
def test_steps_with_more_collectives_than_torch_keeps_are_not_recorded(
    size: str, num_calls: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in BUFFER_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert count_steps_that_fit(num_calls) == sys.maxsize
    monkeypatch.setenv(BUFFER_SIZES[0], size)
    assert count_steps_that_fit(num_calls) == num_steps


def test_a_request_that_is_nonsense_does_nothing(tmp_path: Path) -> None:
    follow_request(0, tmp_path)
    for text in ("{", "[]", "{}", '{"entry": "paceline.nothing:nothing"}'):
        (tmp_path / REQUEST).write_text(text)
        follow_request(0, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [REQUEST]


@pytest.mark.parametrize("size", [None, "4k"], ids=["torch only logs", "tmpfs"])
def test_a_full_disk_leaves_no_part_of_a_trace(
    size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch writes into a file of its own, and only logs that it could not. The training goes on."""

    def export(profiler: Any, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    folder = tmp_path / "traces"
    folder.mkdir()
    if size is None:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
    try:
        recorder = StepRecorder(0, RecordSettings(str(folder), after=1, steps=20), StepMemory())
        recorder.install(torch)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(24):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recorder.finish()
        assert "torch cannot write to" in recorder.failure
        assert "left" in recorder.failure
        assert [path.name for path in folder.iterdir()] in ([], ["rank-0.failed"])
    finally:
        if size is not None:
            # Lazily: torch keeps its file open.
            subprocess.run(["umount", "-l", str(folder)], check=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 0 records no trace: OSError: torch cannot write to")
    assert record.getMessage().endswith("[PL924]")
