"""Runs the tests in two pytest processes side by side, as they wait most of the time: for ranks, for limits.

    python tools/run_tests.py [PYTEST'S WORDS ...]

Each process has the test files of one of the parts below, and ranks of its own. What the first prints is seen
at once, what the second prints when both are done; the last line counts the tests of both. The exit code is
pytest's: 0, or that of the part that failed. With words that name tests, one process runs just these.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path("tests")
# Of about the same length. What is in neither list is in the second part.
FIRST = ("launch", "cli", "bench", "data", "checkpoint", "watch")
_NO_TESTS = 5
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)\b")


def main(words: list[str]) -> int:
    """Runs both parts; gives the exit code."""
    if any(word.startswith(str(TESTS)) for word in words):
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    with tempfile.TemporaryFile("w+", encoding="utf-8") as kept:
        first, second = (
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{number}", *words, *files],
                stdout=subprocess.PIPE if number == 1 else kept,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
            for number, files in enumerate(split_tests(), start=1)
        )
        printed = ""
        assert first.stdout is not None
        try:
            while chunk := first.stdout.read(1):
                sys.stdout.write(chunk)
                sys.stdout.flush()
                printed += chunk
        except KeyboardInterrupt:
            pass  # both have got it too, and tell where they were
        codes = [first.wait(), second.wait()]
        kept.seek(0)
        later = kept.read()
    print(later, end="")
    print(add_up(printed, later), flush=True)
    return next((code for code in codes if code not in (0, _NO_TESTS)), min(codes))


def split_tests() -> tuple[list[str], list[str]]:
    """The test files of both parts."""
    parts: tuple[list[str], list[str]] = ([], [])
    for path in sorted(TESTS.rglob("test_*.py")):
        parts[path.parts[1] not in FIRST].append(str(path))
    return parts


def add_up(*outputs: str) -> str:
    """One line that counts what pytest's closing lines count: `2480 passed, 8 skipped`."""
    totals: dict[str, int] = {}
    for output in outputs:
        for number, what in _COUNT.findall(output.strip().rpartition("\n")[2]):
            totals[what] = totals.get(what, 0) + int(number)
    return ", ".join(f"{number} {what}" for what, number in totals.items()) or "no tests ran"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
