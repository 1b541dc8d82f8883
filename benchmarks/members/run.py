"""Measures what membership costs while nothing happens: time of steps, and computing of beats on 100 nodes.

    python benchmarks/members/run.py               # all of README.md, 6 minutes on an idle machine
    python benchmarks/members/run.py --pairs 20    # a quick run
    python benchmarks/members/run.py --tables      # the last measurement

Keeps the raw times in results.json and their summary in results.txt. Exit code 1 if a claim fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from paceline.bench.machine import describe_machine
from paceline.bench.spread import Spread
from paceline.errors import PacelineError
from paceline.launching.members.membership import Membership
from paceline.launching.members.records import Terms
from paceline.launching.members.wire import Wire, listen
from paceline.launching.members.world import Member, NodeWorld, Waits

HERE = Path(__file__).parent
TRAIN = HERE.parent / "watching" / "train.py"
NUM_NODES = 2
NUM_PAIRS = 200
WARM_UP, NUM_STEPS = 10, 20
STEP_LIMIT = 1.01
NUM_MEMBERS = 100
NUM_SECONDS = 30.0
# Of a core per node, for beats.
BEATS_LIMIT = 0.01
WAYS = ("members", "static")
_MOST_S = 540.0
_END_S = 60.0
# A node is lost after 3 s.
_MOST_STOPPED_S = 2.5


class Job:
    """A training on two nodes, both of them this machine, which stands still except while it runs a block.

    Args:
        way: one of `WAYS`: launchers that beat, or torchrun's static rendezvous.
        num_blocks: that it runs in all.
        folder: for its pipes and its output.
    """

    def __init__(self, way: str, num_blocks: int, folder: Path) -> None:
        self._way, self._gate = way, folder / way
        self._gate.mkdir()
        self._doors = [self._gate / f"go-{rank}" for rank in range(NUM_NODES)]
        for pipe in (*self._doors, self._gate / "done"):
            os.mkfifo(pipe)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._launchers = [self._start(way, node, port, num_blocks) for node in range(NUM_NODES)]

    def _start(self, way: str, node: int, port: int, num_blocks: int) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("paceline")), "run", "--nproc-per-node", "1"]
        if way == "members":
            command += ["--nnodes", f"1:{NUM_NODES}", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "members"]
        else:
            command += ["--nnodes", str(NUM_NODES), "--node-rank", str(node)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += [str(TRAIN), "--blocks", str(num_blocks), "--steps", str(NUM_STEPS)]
        command += ["--warm-up", str(WARM_UP), "--gate", str(self._gate)]
        with (self._gate / f"output-{node}").open("w") as output:
            return subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self._gate)},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._gate,
            )

    def run_block(self) -> dict[str, Any]:
        """Run a block, and return what it has measured."""
        for door in self._doors:
            door.write_text("go")
        found: dict[str, Any] = json.loads((self._gate / "done").read_text())
        return found

    def stop(self) -> None:
        """Stop all processes."""
        self._stopped_s = time.monotonic()
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `stop`; raises SystemExit if its nodes take each other for lost by now."""
        self._send(signal.SIGCONT)
        if (stood_s := time.monotonic() - self._stopped_s) > _MOST_STOPPED_S and self._way == "members":
            raise SystemExit(
                f"a job stood still for {stood_s:.1f} s: the machine is too busy to measure this"
            )

    def end(self) -> None:
        """Wait for its end; raises SystemExit if it failed, or if its nodes lost each other."""
        codes: list[int | None] = []
        for launcher in self._launchers:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_S)
            codes.append(launcher.poll())
        text = "\n".join(path.read_text() for path in sorted(self._gate.glob("output-*")))
        if codes != [0] * NUM_NODES or "the nodes have changed" in text:
            raise SystemExit(f"exit codes {codes}\n{text}")

    def kill(self) -> None:
        """Kill it in whatever state it is."""
        self._send(signal.SIGKILL)
        for launcher in self._launchers:
            launcher.wait()

    def _send(self, number: int) -> None:
        for each in self._launchers:
            with suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(each.pid)
                for process in (launcher, *launcher.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)


def measure_steps(num_pairs: int) -> dict[str, Any]:
    """Run blocks of both ways in turn, every other pair in the other order, for some minutes at most."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    end_s = time.monotonic() + _MOST_S - 2 * NUM_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Job] = {}
        try:
            for way in WAYS:
                jobs[way] = Job(way, num_pairs + 1, Path(folder))
            for job in jobs.values():
                job.run_block()  # the first steps are slow
            for job in jobs.values():
                job.stop()
            pairs = 0
            while pairs < num_pairs and time.monotonic() < end_s:
                for way in WAYS if pairs % 2 == 0 else reversed(WAYS):
                    jobs[way].go_on()
                    found[way].append(jobs[way].run_block())
                    jobs[way].stop()
                pairs += 1
            for job in jobs.values():
                job.go_on()
                if pairs == num_pairs:
                    job.end()
        finally:
            for job in jobs.values():
                job.kill()
    if [one["loss"] for one in found["members"]] != [one["loss"] for one in found["static"]]:
        raise SystemExit("the same training has come to other losses: its nodes have met anew")
    return {
        "num_parameters": found["members"][0]["num_parameters"],
        "took_s": {way: [one["took_s"] for one in each] for way, each in found.items()},
        "computed_s": {way: [one["computed_s"] for one in each] for way, each in found.items()},
    }


class Node:
    """A launcher without ranks, which wants to train."""

    def __init__(self, name: str, port: int, *, founds: bool) -> None:
        listener = listen("127.0.0.1", port if founds else 0)
        me = Member(name, name, "127.0.0.1", listener.getsockname()[1])
        waits = Waits(last_call_s=120.0)
        self.world: NodeWorld | None = None
        self.losses = 0
        self._wire = Wire(listener, waits.beat_s / 5)
        self._inner = Membership(
            *(me, Terms("bench", 1, NUM_MEMBERS), waits, self._wire, self, time.monotonic()),
            endpoints=[("127.0.0.1", port)],
            founds=founds,
        )
        self._wire.start(self._inner)
        offer = {"store_port": 1, "master_port": 1}
        self._wire.post(lambda: self._inner.want_round(offer, time.monotonic()))

    def formed(self, world: NodeWorld) -> None:
        self.world = world

    def over(self, reason: str, *, lost: bool) -> None:
        self.losses += 1

    def closed(self, *, failed: bool) -> None:
        pass

    def failed(self, error: PacelineError) -> None:
        raise error


def run_nodes(count: int, port: int, *, founds: bool) -> float:
    """Run so many launchers in this process, and return its computing per second once all train together."""
    nodes = [Node(f"{os.getpid()}-{i}", port, founds=founds) for i in range(count)]
    end_s = time.monotonic() + 120
    while any(node.world is None for node in nodes):
        if time.monotonic() > end_s:
            raise SystemExit("the launchers have not met")
        time.sleep(0.1)
    time.sleep(2)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    time.sleep(NUM_SECONDS)
    took_s, computed_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    if any(node.losses for node in nodes):
        raise SystemExit("launchers were lost meanwhile: the machine is too busy")
    return computed_s / took_s


def measure_beats() -> dict[str, float]:
    """Measure the leader, which has a process of its own, and the others, which share one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, __file__, "--nodes"]
    leader = subprocess.Popen([*words, "1", str(port), "leads"], stdout=subprocess.PIPE, text=True)
    others = subprocess.Popen(
        [*words, str(NUM_MEMBERS - 1), str(port), "follows"], stdout=subprocess.PIPE, text=True
    )
    try:
        # Both beat on until both have measured: the end of one would be a loss to the other.
        texts = [process.stdout.readline() for process in (leader, others) if process.stdout is not None]
    finally:
        leader.kill()
        others.kill()
    if not all(texts):
        raise SystemExit("the launchers failed")
    return {"leader": float(texts[0]), "other": float(texts[1]) / (NUM_MEMBERS - 1)}


def spread_ratio(result: dict[str, Any], key: str) -> Spread:
    """Return the ratio of the block with membership of each pair to the other one."""
    return Spread.of(a / b for a, b in zip(result[key]["members"], result[key]["static"], strict=True))


def describe(result: dict[str, Any]) -> str:
    """Return what was measured on what, and tables in Markdown."""
    lines = [
        result["machine"],
        f"{result['num_parameters']:,} parameters, {NUM_NODES} launchers with a rank each, {NUM_STEPS} timed "
        f"steps per block; {result['started']}, load before {result['load_before']:.2f}, "
        f"after {result['load_after']:.2f}",
        "",
        "| | with members, ms per step | static, ms | ratio | interval of the median | pairs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for key, words in (("took_s", "time of a step"), ("computed_s", "CPU time of a step, all ranks")):
        ratio = spread_ratio(result, key)
        ours, static = (1e3 * median(result[key][way]) / NUM_STEPS for way in WAYS)
        lines.append(
            f"| {words} | {ours:.4g} | {static:.4g} | {ratio.median:.4f} | {ratio.low:.4f} to "
            f"{ratio.high:.4f} ({ratio.confidence:.0%}) | {ratio.num_values} |"
        )
    beats = result["beats"]
    mean = (beats["leader"] + (NUM_MEMBERS - 1) * beats["other"]) / NUM_MEMBERS
    lines += [
        "",
        f"beats of {NUM_MEMBERS} nodes, per node: {mean:.2%} of a core; leader {beats['leader']:.2%}, each "
        f"other {beats['other']:.2%}",
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of blocks (default %(default)d)")
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.txt")
    parser.add_argument("--nodes", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nodes is not None:
        count, port, part = args.nodes
        print(run_nodes(int(count), int(port), founds=part == "leads"), flush=True)
        threading.Event().wait()  # the threads beat on; `measure_beats` ends the process
    path = args.out / "results.json"
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        started, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
        beats = measure_beats()
        result = {
            "machine": f"{describe_machine()}, gloo, 1 thread per rank",
            "started": started,
            "load_before": load,
            "beats": beats,
            **measure_steps(args.pairs),
        }
        path.write_text(json.dumps({**result, "load_after": os.getloadavg()[0]}) + "\n")
    result = json.loads(path.read_text())
    text = describe(result)
    (args.out / "results.txt").write_text(text)
    print(text)
    missed = []
    if (high := spread_ratio(result, "took_s").high) > STEP_LIMIT:
        missed.append(f"upper end {high:.4f}, wanted {STEP_LIMIT}")
    if (leader := result["beats"]["leader"]) > BEATS_LIMIT:
        missed.append(f"the leader takes {leader:.2%} of a core, wanted {BEATS_LIMIT:.0%}")
    for each in missed:
        print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
