"""The commands of the README work as printed, from top to bottom in one clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "make env && export PATH=$PWD/.venv/bin:$PATH"


def list_commands() -> list[str]:
    """Return the lines of the README's shell blocks, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_command_works_in_a_fresh_clone(tmp_path: Path) -> None:
    first, *commands = list_commands()
    assert first == BUILD, "the tests run in what it builds"
    assert len(commands) >= 6
    clone = tmp_path / "paceline"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=100)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "PYTHONPATH": str(clone / "src")}
    printed = {}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "complete: no step" not in done.stderr, f"{command} found a finished run"
        printed[command] = done.stdout
    one, three = (printed[command].splitlines()[-1] for command in commands if "digits.py" in command)
    assert one == three
