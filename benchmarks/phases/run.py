"""Compares the phases of three readings of each training: a light recording, a full one, and a foreign trace.

The foreign trace is the full recording without Paceline's table, so both are of the same steps. The light
recording is of another run, in turn with the full one.

    python benchmarks/phases/run.py                    # all cases
    python benchmarks/phases/run.py Training --rounds 5
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from training import CASES, FIRST, RECORDED  # noqa: E402

PHASES = ("data", "forward", "backward", "optimizer", "host", "compute", "exposed")
_TOLERANCE, _LEAST_MS = 0.1, 0.5
Row = dict[str, Any]


def main() -> None:
    """Print milliseconds per phase, of each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    right = {"light": 0, "read": 0}
    number = 0
    for case in arguments.cases:
        light, full, read = [], [], []
        codes = set()
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as name:
                for way, rows in (("light", light), ("full", full)):
                    table = record(case, way, Path(name) / way)
                    rows += table["rows"]
                    codes |= {finding["code"] for finding in table["findings"]}
                read += read_foreign(Path(name) / "full")
        print(f"{case}: {', '.join(sorted(codes)) or 'no finding'}")
        print(f"  {'':10}    light     full | full and read, same steps")
        for phase in PHASES:
            # The fastest of all steps: a busy machine makes most of them longer.
            fastest = [min(take(rows, phase)) for rows in (light, full)]
            same = [median(take(rows, phase)) for rows in (full, read)]
            are_close = [is_close(pair) for pair in (fastest, same)]
            number += 1
            for way, close in zip(right, are_close, strict=True):
                right[way] += close
            marks = "".join(
                f"  {way} differs" for way, close in zip(right, are_close, strict=True) if not close
            )
            print(
                f"  {phase:10}{fastest[0]:9.2f}{fastest[1]:9.2f} |{same[0]:9.2f}{same[1]:9.2f}{marks}",
                flush=True,
            )
    print(f"within 10% or {_LEAST_MS} ms, of {number}: light {right['light']}, read {right['read']}")


def is_close(pair: Sequence[float]) -> bool:
    """Return whether two times in milliseconds agree."""
    return max(pair) - min(pair) <= max(_LEAST_MS, _TOLERANCE * max(pair))


def take(rows: Sequence[Row], phase: str) -> list[float]:
    """Return the milliseconds of a phase in each step of rank 0."""
    own = [row for row in rows if row["rank"] == 0]
    return [
        (row[f"{phase}_ns"] if f"{phase}_ns" in row else row["phases"].get(phase, 0)) / 1e6 for row in own
    ]


def record(case: str, way: str, folder: Path) -> Row:
    """Record a training, and return the report's table."""
    flags = ["--nproc-per-node", "2", "--from", str(FIRST), "--steps", str(RECORDED), "--out", str(folder)]
    start(["profile", *flags, *["--full"] * (way == "full"), str(HERE / "training.py"), case])
    return json.loads(start(["profile", "read", str(folder), "--json"]))


def read_foreign(folder: Path) -> list[Row]:
    """Return the rows of the same steps, without what the recorder knows but their numbers."""
    for path in folder.glob("rank-*.json"):
        table = json.loads(path.read_text())
        ours = table.pop("paceline")
        base = table.get("baseTimeNanoseconds", 0)
        table["traceEvents"] += [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{number}",
                "pid": 0,
                "tid": 0,
                "ts": (begin - base) / 1e3,
                "dur": (end - begin) / 1e3,
                "args": {},
            }
            for number, begin, end in ours["steps"]
        ]
        path.write_text(json.dumps(table))
    return json.loads(start(["profile", "read", str(folder), "--json"]))["rows"]


def start(words: list[str]) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True)
    if done.returncode not in (0, 1) or (words[:2] != ["profile", "read"] and done.returncode):
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
