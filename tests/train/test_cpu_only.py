"""What is chosen for CPUs alone stands in one list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
BELOW_THE_TOOLS = ("parallel", "train", "comm", "checkpoint", "data", "models")


def asks_for_the_cpu(path: Path) -> bool:
    """Return whether a file compares something with "cpu"."""
    return any(
        isinstance(part, ast.Constant) and part.value == "cpu"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
    )


def test_every_choice_for_cpus_is_listed() -> None:
    files = [path for room in BELOW_THE_TOOLS for path in (SOURCE / room).rglob("*.py")]
    choosing = {p.relative_to(ROOT).as_posix() for p in (*files, *SOURCE.glob("*.py")) if asks_for_the_cpu(p)}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## What differs on the CPU")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert choosing == {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
