"""Runs the tests on one version of torch, in an environment of its own.

    python3.12 tools/run_on_torch.py 2.11.0 [PYTEST'S WORDS ...]

The environment is .venv-torch-VERSION-pyPYTHON, made with the Python that runs this. All versions but torch's
and what torch rules out are those of requirements.lock. Without pytest's words all tests of `make test` run,
and their counts become a row of docs/tables/torch.md, in place of an earlier row of the same versions.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "tables" / "torch.md"
LOCK = "requirements.lock"
# torch up to 2.12 rules out the version in requirements.lock.
OLDER_SETUPTOOLS = ((2, 13), "setuptools==81.0.0")
HEADER = ("torch", "Python", "system", "passed", "failed", "skipped", "seconds")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


def main(words: list[str]) -> int:
    """Build the environment, run the tests and record the row; the exit code is that of the tests."""
    if not words or not re.fullmatch(r"\d+\.\d+\.\d+", words[0]):
        print("Name a version of torch: make test-torch TORCH=2.11.0", file=sys.stderr)
        return 2
    torch, tests = words[0], words[1:]
    venv = f".venv-torch-{torch}-py{sys.version_info[0]}.{sys.version_info[1]}"
    code = _load_builder().main([str(ROOT / venv), LOCK, *list_pins(torch)])
    if code:
        return code
    started_s = time.monotonic()
    code, last_line = _run_tests(venv, tests)
    if not tests and COUNT.search(last_line):
        write_row(TABLE, build_row(torch, last_line, round(time.monotonic() - started_s)))
    return code


def list_pins(torch: str) -> list[str]:
    """Return the pins that take the place of those in requirements.lock."""
    first_newer, setuptools = OLDER_SETUPTOOLS
    version = tuple(int(part) for part in torch.split(".")[:2])
    return [f"torch=={torch}", *([setuptools] if version < first_newer else [])]


def build_row(torch: str, counts: str, seconds: int) -> list[str]:
    """Return one row of the table, from the line that counts the tests."""
    found = {what.rstrip("s"): int(number) for number, what in COUNT.findall(counts)}
    failed = found.get("failed", 0) + found.get("error", 0)
    numbers = (found.get("passed", 0), failed, found.get("skipped", 0), seconds)
    system = f"{platform.system()} {platform.machine()}"
    return [torch, platform.python_version(), system, *map(str, numbers)]


def write_row(table: Path, row: list[str]) -> None:
    """Add a row, or replaces that of the same versions and system; rows are in the order of the versions."""
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rows = sorted([*(old for old in rows if old[:3] != row[:3]), row], key=_order)
    written = [_line(HEADER), _line(["---"] * len(HEADER)), *map(_line, rows)]
    table.write_text("\n".join(written) + "\n", encoding="utf-8")


def _run_tests(venv: str, tests: list[str]) -> tuple[int, str]:
    """Return the exit code, and the last line, which counts."""
    command = [f"{venv}/bin/python", "tools/run_tests.py", "-m", "not slow and not chaos", *tests]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    )
    assert process.stdout is not None
    last_line = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last_line = line.strip() or last_line
    return process.wait(), last_line


def _load_builder():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("build_env", Path(__file__).parent / "build_env.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


def _order(row: list[str]) -> list[tuple[int, ...]]:
    return [tuple(int(part) for part in re.findall(r"\d+", cell)) for cell in row[:2]]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
