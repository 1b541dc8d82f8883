"""Measures `paceline profile read`: a trace of 100 MB, and eight of them.

python benchmarks/reading_traces/run.py                # all; writes results.txt beside this file
python benchmarks/reading_traces/run.py --only 100MB   # 100MB or 8x100MB, only printed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import describe_machine

HERE = Path(__file__).parent
SIZE = 100_000_000
CASES = {"100MB": (1, SIZE, 5), "8x100MB": (8, SIZE, 3)}
"""By name: files, bytes of each, and runs."""
LIMITS = {"100MB": (3.0, 0.6), "8x100MB": (25.0, None)}
"""The most processor seconds and GB."""
# What torch's profiler writes beside an operator, so that an event has a usual length.
ARGUMENTS = {"External id": 1234567, "Record function id": 0, "Sequence number": 123456, "Fwd thread id": 1}


def list_step() -> Iterator[dict[str, Any]]:
    """Yield the events of one step of 50 ms: 120 operators forward, 240 backward, 12 collectives."""

    def event(category: str, name: str, thread: int, at: float, length: float) -> dict[str, Any]:
        times = {"ts": at, "dur": length}
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


def write_trace(path: Path, rank: int, world_size: int, num_bytes: int) -> int:
    """Write a trace of at least so many bytes, as torch lays it out; return the number of its events."""
    events = list(list_step())
    times = [each["ts"] for each in events]
    text = "  ,\n".join(json.dumps({**each, "ts": "AT"}, indent=4) for each in events)
    template = text.replace("%", "%%").replace('"AT"', "%.3f")
    num_steps = 0
    with path.open("w", encoding="utf-8") as stream:
        info = {"backend": "gloo", "rank": rank, "world_size": world_size}
        stream.write('{\n  "schemaVersion": 1,\n')
        stream.write(f'  "distributedInfo": {json.dumps(info)},\n  "traceEvents": [\n')
        while stream.tell() < num_bytes:
            begin = num_steps * 50_000.0
            stream.write(("  ,\n" if num_steps else "") + template % tuple(begin + at for at in times))
            num_steps += 1
        stream.write("]\n}\n")
    return num_steps * len(events)


def measure(paths: Sequence[Path]) -> tuple[float, float, float]:
    """Return seconds, processor seconds and peak GB of one reading, the start of Python included."""
    command = [sys.executable, "-m", "paceline", "profile", "read", *map(str, paths)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), process.returncode
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def run_case(name: str) -> tuple[str, bool]:
    """Return a line of the table, and whether the limits hold."""
    num_files, num_bytes, runs = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank-{rank}.json" for rank in range(num_files)]
        count = sum(write_trace(path, rank, num_files, num_bytes) for rank, path in enumerate(paths))
        found = [measure(paths) for _ in range(runs)]
    took, seconds, memory = zip(*found, strict=True)
    limits = zip(LIMITS[name], (max(seconds), max(memory)), strict=True)
    is_within = all(most is None or value <= most for most, value in limits)
    cells = [f"{name:>8}", f"{count:>10,}", f"{runs:>4}", f"{median(took):>12.2f}"]
    cells += [f"{median(seconds):>11.2f}", f"{max(seconds):>7.2f}", f"{max(memory):>7.2f}"]
    return "  ".join([*cells, "yes" if is_within else "no"]), is_within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    lines = [
        f"{describe_machine()}, {time.strftime('%Y-%m-%d %H:%M')}, load before {os.getloadavg()[0]:.2f}",
        "    case      events  runs  s (median)  CPU s (median)  largest  GB (largest)  within the limit",
    ]
    results = [run_case(name) for name in ([args.only] if args.only else CASES)]
    text = "\n".join([*lines, *(line for line, _ in results)]) + "\n"
    if not args.only:
        (HERE / "results.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if all(is_within for _, is_within in results) else 1


if __name__ == "__main__":
    sys.exit(main())
