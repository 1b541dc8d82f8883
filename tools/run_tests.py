"""Runs the tests in three pytest processes at once, as they wait most of the time: for ranks, for limits.

    python tools/run_tests.py [PYTEST'S WORDS ...]

Each process has the test files of one of the parts below, and ranks of its own. What the first prints is seen
at once, what the others print when all are done; the last line counts the tests of all. The exit code is
pytest's: 0, or that of a part that failed. With words that name tests, one process runs just these.
"""

from __future__ import annotations

import compileall
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

TESTS = Path("tests")
# Of about the same length; what is in no list is in the last part. "." has the files beside the folders.
PARTS = (
    (
        *(".", "launching", "cli", "memory", "chaos"),
        *("profiling", "checkpoint", "models", "recipe", "bench", "doctor", "lint", "plan", "pipeline"),
    ),
    ("watch", "parallel", "verifying", "dist"),
    (),
)
_NO_TESTS = 5
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)\b")


def main(words: list[str]) -> int:
    """Run all parts; return the exit code."""
    # Once for the hundreds of processes to come, which may not keep it where PYTHONDONTWRITEBYTECODE is set.
    compileall.compile_dir("src", quiet=2, workers=0)
    if any(word.startswith(str(TESTS)) for word in words):
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    with ExitStack() as stack:
        parts = [files for files in split_tests() if files]  # without files pytest would take them all
        kept = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in parts[1:]]
        first, *others = (
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{number}", *words, *files],
                stdout=subprocess.PIPE if number == 0 else kept[number - 1],
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
            for number, files in enumerate(parts)
        )
        printed = [""]
        assert first.stdout is not None
        try:
            while chunk := first.stdout.read(1):
                sys.stdout.write(chunk)
                sys.stdout.flush()
                printed[0] += chunk
        except KeyboardInterrupt:
            pass  # all have got it too, and tell where they were
        codes = [process.wait() for process in (first, *others)]
        for file in kept:
            file.seek(0)
            printed.append(file.read())
    print(*printed[1:], sep="", end="")
    print(add_up(*printed), flush=True)
    return next((code for code in codes if code not in (0, _NO_TESTS)), min(codes))


def split_tests() -> list[list[str]]:
    """Return the test files of each part."""
    parts: list[list[str]] = [[] for _ in PARTS]
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.relative_to(TESTS).parts[0] if path.parent != TESTS else "."
        number = next((n for n, names in enumerate(PARTS) if folder in names), -1)
        parts[number].append(str(path))
    return parts


def add_up(*outputs: str) -> str:
    """One line that counts what pytest's closing lines count: `2480 passed, 8 skipped`."""
    totals: dict[str, int] = {}
    for output in outputs:
        # A process may print warnings after pytest's closing line.
        closing = next((line for line in reversed(output.splitlines()) if _COUNT.search(line)), "")
        for number, what in _COUNT.findall(closing):
            totals[what] = totals.get(what, 0) + int(number)
    return ", ".join(f"{number} {what}" for what, number in totals.items()) or "no tests ran"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
