"""The wheel works without the repository: built, installed apart, it runs what docs/install.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(command: list[str] | str, folder: Path, **environment: str) -> str:
    """Return what a command printed, or fail with it."""
    done = subprocess.run(
        command if isinstance(command, list) else ["bash", "-c", command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path) -> Path:
    clone = folder / "clone"  # setuptools leaves its folders beside the source
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], folder)
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder)], clone)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_newcomers_first_five_minutes(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel")
    wheel = build(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("recipes/gpt-stdlib.toml") for name in names)
    assert not [name for name in names if "tests/" in name]
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    description = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "](" not in description, "links that lead nowhere on an index"

    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--system-site-packages", str(environment)], tmp_path)
    # The packages of the environment that runs the tests, torch above all, come after the wheel's own.
    (site,) = environment.glob("lib/python*/site-packages")
    (own,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(f"{own}\n")
    python = environment / "bin" / "python"
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", str(wheel)],
        tmp_path,
    )
    newcomer = tmp_path / "newcomer"
    newcomer.mkdir()
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    place = run("python -c 'import paceline; print(paceline.__file__)'", newcomer, PATH=path)
    assert place.startswith(str(environment)), place

    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    commands = [line.partition("  #")[0] for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        run(command, newcomer, PATH=path)
    assert (newcomer / "model.safetensors").exists()
