"""Measures the cost of watching: one training under `paceline run` with and without `--no-watch`, in turn.

    python benchmarks/watching/run.py              # all of README.md
    python benchmarks/watching/run.py --launches 1   # a quick look
    python benchmarks/watching/run.py --tables     # of what was measured before

Keeps the raw times in results.json and their summary in results.txt. Exit code 1 where the claim fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from paceline.bench.spread import Spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import describe_machine

HERE = Path(__file__).parent
NUM_RANKS = 2
NUM_LAUNCHES = 8
NUM_PAIRS = 200
NUM_STEPS = 20
# Before the timed ones of a block: what was due while the job stood still is done then, and caches fill.
NUM_WARM_UP = 10
# What the upper end of the interval must stay under.
LIMIT = 1.02
WAYS: dict[str, list[str]] = {"watched": [], "unwatched": ["--no-watch"]}
# For a job to end.
_END_S = 60.0


class Job:
    """A training whose processes are all stopped, except while it runs a block of steps.

    Args:
        way: one of `WAYS`.
        num_blocks: that it runs in all.
        num_steps: timed in each.
        folder: for its pipes and its output.
    """

    def __init__(self, way: str, num_blocks: int, num_steps: int, folder: Path) -> None:
        self._gate = folder / way
        self._gate.mkdir()
        self._doors = [self._gate / f"go-{rank}" for rank in range(NUM_RANKS)]
        for pipe in (*self._doors, self._gate / "done"):
            os.mkfifo(pipe)
        paceline = str(Path(sys.executable).with_name("paceline"))
        command = [paceline, "run", "--nproc-per-node", str(NUM_RANKS), *WAYS[way], str(HERE / "train.py")]
        command += ["--blocks", str(num_blocks), "--steps", str(num_steps), "--warm-up", str(NUM_WARM_UP)]
        self._output = self._gate / "output"
        self._process = subprocess.Popen(
            [*command, "--gate", str(self._gate)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=(file := self._output.open("w")),
            stderr=subprocess.STDOUT,
            cwd=self._gate,
            start_new_session=True,
        )
        file.close()

    def run_block(self, *, is_last: bool = False) -> dict[str, Any]:
        """Let it run a block; return what it has measured of it."""
        self._send(signal.SIGCONT)
        for door in self._doors:
            door.write_text("go")
        found: dict[str, Any] = json.loads((self._gate / "done").read_text())
        if not is_last:
            self._send(signal.SIGSTOP)
        return found

    def end(self) -> list[str]:
        """Wait for its end; return the codes of its messages.

        Raises:
            SystemExit: it has failed.
        """
        code, text = self._process.wait(_END_S), self._output.read_text()
        if code:
            raise SystemExit(f"exit code {code}\n{text}")
        return re.findall(r"\[(PL\d+)\]", text)

    def kill(self) -> None:
        """Kill it, whatever state it is in."""
        with suppress(psutil.NoSuchProcess):
            self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: int) -> None:
        launcher = psutil.Process(self._process.pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def measure(num_launches: int, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Blocks of both ways in turn; every other pair in the other order.

    Raises:
        SystemExit: watching has changed the training.
    """
    started, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    said: list[str] = []
    for _ in range(num_launches):
        for way, (blocks, codes) in measure_launch(num_pairs, num_steps).items():
            found[way] += blocks
            said += codes
    if [one["loss"] for one in found["watched"]] != [one["loss"] for one in found["unwatched"]]:
        raise SystemExit("the same training has come to other losses")
    return {
        "num_parameters": found["watched"][0]["num_parameters"],
        "num_ranks": NUM_RANKS,
        "launches": num_launches,
        "steps": num_steps,
        "started": started,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "machine": f"{describe_machine()}, gloo, 1 thread per rank",
        "said": said,
        "took_s": {way: [one["took_s"] for one in each] for way, each in found.items()},
        "computed_s": {way: [one["computed_s"] for one in each] for way, each in found.items()},
    }


def measure_launch(num_pairs: int, num_steps: int) -> dict[str, tuple[list[dict[str, Any]], list[str]]]:
    """One launch of each way: its blocks, and the codes of its messages."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Job] = {}
        try:
            for way in WAYS:
                jobs[way] = Job(way, num_pairs + 1, num_steps, Path(folder))
                jobs[way].run_block()  # the first steps are slow
            for pair in range(num_pairs):
                for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                    found[way].append(jobs[way].run_block(is_last=pair == num_pairs - 1))
            return {way: (found[way], job.end()) for way, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.kill()


def spread_ratio(result: dict[str, Any], key: str) -> Spread:
    """Return the ratio of the watched block of a pair to the other one."""
    times = result[key]
    return Spread.of(a / b for a, b in zip(times["watched"], times["unwatched"], strict=True))


def describe(result: dict[str, Any]) -> str:
    """Return what was measured on which machine, and a table in Markdown."""
    steps = result["steps"]
    lines = [
        result["machine"],
        f"{result['num_parameters']:,} parameters, {result['num_ranks']} ranks, {steps} steps per block, "
        f"{result['launches']} launches of each; "
        f"{result['started']}, load before {result['load_before']:.2f}, after {result['load_after']:.2f}",
        "",
        "| | watched, ms per step | unwatched, ms | ratio | interval of the median | pairs | of all time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key, words in (("took_s", "time of a step"), ("computed_s", "CPU time of a step, all ranks")):
        ratio = spread_ratio(result, key)
        watched, unwatched = (1e3 * median(result[key][way]) / steps for way in WAYS)
        total = sum(result[key]["watched"]) / sum(result[key]["unwatched"])
        lines.append(
            f"| {words} | {watched:.4g} | {unwatched:.4g} | {ratio.median:.4f} | {ratio.low:.4f} to "
            f"{ratio.high:.4f} ({ratio.confidence:.0%}) | {ratio.num_values} | {total:.4f} |"
        )
    said = Counter(result["said"])
    lines += ["", "said: " + (", ".join(f"{code} in {n} launches" for code, n in said.items()) or "nothing")]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--launches", type=int, default=NUM_LAUNCHES, help="of each way (default %(default)d)"
    )
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of blocks, per launch (%(default)d)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="timed in a block (%(default)d)")
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.txt")
    args = parser.parse_args()
    path = args.out / "results.json"
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(args.launches, args.pairs, args.steps)) + "\n")
    result = json.loads(path.read_text())
    text = describe(result)
    (args.out / "results.txt").write_text(text)
    print(text)
    high = spread_ratio(result, "took_s").high
    if high > LIMIT:
        print(f"missed: upper end {high:.4f}, wanted {LIMIT}")
    return 1 if high > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
