"""The blocks of docs/tasks.md and coming_from.md run as they stand, in one process and on three ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def read_blocks() -> tuple[str, dict[str, str]]:
    """Return the common beginning, and the other blocks of Python by their headings."""
    start, *sections = (DOCS / "tasks.md").read_text(encoding="utf-8").split("\n## ")
    sections += (DOCS / "coming_from.md").read_text(encoding="utf-8").split("\n## ")[1:]
    pattern = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
    beginning = "".join(pattern.findall(start))
    return beginning, {part.splitlines()[0]: "".join(pattern.findall(part)) for part in sections}


BEGINNING, BLOCKS = read_blocks()
RUNNING = {heading: block for heading, block in BLOCKS.items() if block}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=environ)


def test_all_blocks_run_in_one_process(tmp_path: Path) -> None:
    """One start for all of them, as importing torch and transformers takes longer than they do."""
    script = tmp_path / "tasks.py"
    script.write_text(BEGINNING + "\n\n".join(RUNNING.values()), encoding="utf-8")
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(RUNNING) >= 8
    assert (tmp_path / "model.pt").exists()
    assert (tmp_path / "gpt2-tuned" / "config.json").exists()
    assert list((tmp_path / "runs" / "curve" / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("heading", sorted(RUNNING))
def test_each_block_runs_on_three_ranks(heading: str, tmp_path: Path) -> None:
    script = tmp_path / "task.py"
    script.write_text(BEGINNING + RUNNING[heading], encoding="utf-8")
    done = run([sys.executable, "-m", "paceline", "run", "--nproc-per-node", "3", str(script)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
