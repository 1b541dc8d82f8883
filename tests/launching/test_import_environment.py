"""The list of variables that are read at import against a measurement of the torch that is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.launching.warm.import_environment import READ_AT_IMPORT, READ_AT_LOAD_WITH_CUDA

TOOL = Path(__file__).resolve().parents[2] / "tools/measure_import_environment.py"
FAMILY = ("TORCH", "PYTORCH", "ATEN", "OMP", "MKL", "KMP", "OPENBLAS", "GOMP", "NUMPY", "NPY")


def _measured(*options: str) -> list[dict[str, str]]:
    """Return the reads of torch's family in a fresh process that imports torch, then torch._dynamo."""
    command = [sys.executable, str(TOOL), "--json", "--only", "torch", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [read for read in json.loads(done.stdout) if read["name"].startswith(FAMILY)]


def _missing(reads: list[dict[str, str]]) -> list[str]:
    """Names that an import read, with their readers, but that the list for this import doesn't have."""
    known = dict(READ_AT_IMPORT)
    if torch.version.cuda is not None:
        known["torch"] |= READ_AT_LOAD_WITH_CUDA
    at_import = [read for read in reads if read["phase"] in known]
    return [f"{r['name']} ({r['by']})" for r in at_import if r["name"] not in known[r["phase"]]]


def test_python_reads_are_listed() -> None:
    reads = _measured("--no-c")
    assert any(read["name"] == "TORCH_LOGS" and read["phase"] == "torch" for read in reads)
    assert _missing(reads) == []


@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="reads by C code need cc and LD_PRELOAD"
)
def test_c_reads_are_listed() -> None:
    reads = _measured()
    by_c = {read["name"] for read in reads if read["language"] == "c" and read["phase"] == "torch"}
    assert "OMP_NUM_THREADS" in by_c
    assert _missing(reads) == []


def test_list_loads_no_torch() -> None:
    command = "import sys, paceline.launching.warm.import_environment; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", command], env=env, timeout=60, check=False).returncode == 0
