"""Measures `paceline profile read` on a trace of 100 MB: processor seconds and peak memory.

python benchmarks/reading_traces/run.py [--runs 5]      # writes results.txt beside this file
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
SIZE = 100_000_000
# What torch's profiler writes beside an operator, so that an event has a usual length.
ARGUMENTS = {"External id": 1234567, "Record function id": 0, "Sequence number": 123456, "Fwd thread id": 1}


def list_step(number: int) -> Iterator[dict[str, Any]]:
    """Return the events of one step of 50 ms: 120 operators forward, 240 backward, 12 collectives."""
    begin = number * 50_000.0

    def event(category: str, name: str, thread: int, at: float, length: float) -> dict[str, Any]:
        times = {"ts": begin + at, "dur": length}
        return {
            "ph": "X", "cat": category, "name": name, "pid": 4242, "tid": thread, **times, "args": ARGUMENTS,
        }  # fmt: skip

    yield event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 0, 900)
    for place in range(60):
        yield event("cpu_op", "aten::linear", 1, 1000 + place * 150, 140)
        yield event("cpu_op", "aten::addmm", 1, 1010 + place * 150, 120)
    for place in range(120):
        at = 10_500 + place * 200
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        yield event("cpu_op", name, 1, at, 190)
        yield event("cpu_op", "aten::mm", 1, at + 10, 170)
        if place % 10 == 9:
            yield event("cpu_op", "c10d::allreduce_", 2, at, 20)
            yield event("user_annotation", "gloo:all_reduce", 3, at + 50, 1500)
    yield event("user_annotation", "Optimizer.step#AdamW.step", 1, 40_000, 8000)


def write_trace(path: Path) -> int:
    """Write a trace of at least SIZE bytes, as torch lays it out; return the number of its events."""
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        info = {"backend": "gloo", "rank": 0, "world_size": 1}
        stream.write('{\n  "schemaVersion": 1,\n')
        stream.write(f'  "distributedInfo": {json.dumps(info)},\n  "traceEvents": [\n')
        number = 0
        while stream.tell() < SIZE:
            for each in list_step(number):
                stream.write(("  ,\n" if count else "") + json.dumps(each, indent=4))
                count += 1
            number += 1
        stream.write("]\n}\n")
    return count


def measure(path: Path) -> tuple[float, float]:
    """Return processor seconds and peak GB of one reading, the start of Python included."""
    command = [sys.executable, "-m", "paceline", "profile", "read", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), process.returncode
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rank-0.json"
        count = write_trace(path)
        size = path.stat().st_size
        results = [measure(path) for _ in range(args.runs)]
    seconds, memory = zip(*results, strict=True)
    lines = [
        f"{size / 1e6:.0f} MB, {count:,} events, {args.runs} runs",
        f"processor seconds  median {median(seconds):.2f}, largest {max(seconds):.2f}",
        f"peak memory, GB    median {median(memory):.2f}, largest {max(memory):.2f}",
    ]
    text = "\n".join(lines) + "\n"
    (HERE / "results.txt").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
