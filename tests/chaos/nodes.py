"""Measures what the loss and the return of nodes costs: `python -m tests.chaos.nodes [--times 3]`.

The nodes are network namespaces with processes of their own. A script takes a step every 0.1 s and saves
every fifth one. Each row is a fault; its seconds are those without a step, until the first one on the nodes
that should go on. `--torchrun` runs the same under torchrun with its defaults. The table goes to nodes.txt.
`--random 60 --seed 1` draws faults instead: random_nodes.py. `--flapping 60` counts the steps of so many
seconds while a node's link is down for 2 s in 10, beside as many undisturbed ones: flapping.txt.
`--partitions 40` resets and parts nodes with disks of their own: partitions.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tests.launching.etcd_server import EtcdServer
from tests.launching.launched import Launched, paceline_run, script, torchrun
from tests.launching.nodes import Nodes, why_no_nodes

TABLE = Path(__file__).with_name("nodes.txt")
FLAPPING = Path(__file__).with_name("flapping.txt")
_START_S = 180.0
_LIMIT_S = 90.0


class Job:
    """A job on nodes, and its steps so far."""

    def __init__(
        self,
        folder: Path,
        count: int,
        nnodes: str,
        launcher: Callable[..., list[str]],
        program: Sequence[str] = (),
        flags: Sequence[str] = ("--max-restarts", "3"),
        store: str = "folder",
    ) -> None:
        """Prepare a job; its store is `c10d` on node 0, `etcd` on a node of its own, or a `folder`."""
        self.folder, self.count, self.nnodes, self.launcher = folder, count, nnodes, launcher
        self.program = list(program) or [script("steps.py"), str(folder)]
        self.flags = list(flags)
        self.store = store
        self.launched: dict[int, Launched] = {}
        self._starts = 0

    def __enter__(self) -> Job:
        self._stack = ExitStack()
        self.nodes = self._stack.enter_context(Nodes(self.count + 1))
        if self.store == "etcd":
            around = partial(self.nodes.command, self.count)
            host = self.nodes.address(self.count)
            self._stack.enter_context(EtcdServer(self.folder, host, around=around))
        return self

    def meeting(self) -> list[str]:
        """Return the flags for the job's store."""
        place = {
            "c10d": f"{self.nodes.address(0)}:29501",
            "etcd": f"{self.nodes.address(self.count)}:2379",
            "folder": str(self.folder / "meeting"),
        }
        return ["--rdzv-backend", self.store, "--rdzv-endpoint", place[self.store]]

    def __exit__(self, *error: object) -> None:
        for launched in self.launched.values():
            launched.process.kill()  # and with it all processes of its node
        self._stack.close()

    def start(self, node: int, *, interface: str = "eth0", name: str = "chaos") -> None:
        """Start a node's launcher."""
        words = ["--nnodes", self.nnodes, "--nproc-per-node", "1", *self.flags]
        if "--rdzv-backend" not in words:
            words += self.meeting()
        if "--local-addr" not in words:
            words += ["--local-addr", self.nodes.address(node)]
        words += ["--rdzv-id", name]
        command = self.launcher(*words, *self.program)
        self._starts += 1
        launched = Launched(
            self.folder / f"node{node}-{self._starts}",
            command,
            env={
                "GLOO_SOCKET_IFNAME": interface,
                "PYTHONWARNINGS": "ignore",
            },
            around=lambda inner: self.nodes.powered(self.nodes.command(node, inner)),
        )
        self.launched[node] = self._stack.enter_context(launched)

    def restore(self) -> bool:
        """Bring all nodes back; return whether they then train together."""
        for node in range(self.count):
            self.nodes.heal(node)
            launched = self.launched.get(node)
            if launched is not None and launched.process.poll() is None:
                self.each_process(node, psutil.Process.resume)
            else:
                self.start(node)
        begin_s = time.monotonic()
        row = self.await_step(lambda row: row["at_s"] > begin_s and row["size"] == self.count, _START_S)
        if row is not None:
            # In the middle of its work, and not in that of a change.
            time.sleep(2.0)
            row = self.await_step(
                lambda row: row["at_s"] > begin_s + 2.0 and row["size"] == self.count, _START_S
            )
        return row is not None

    def kill(self, node: int) -> None:
        """Send SIGKILL to all processes of a node; its machine stays reachable."""
        self.launched[node].process.kill()

    def power_off(self, node: int) -> None:
        """Cut a node off and end it, without a message to the others."""
        self.nodes.cut(node)
        self.kill(node)

    def each_process(self, node: int, call: Callable[[psutil.Process], None]) -> None:
        """Call a function for each process of a node."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                call(process)

    def kill_rank(self, node: int) -> None:
        """Send SIGKILL to one rank of a node, if there is one now."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                # Forks keep the command line: the launcher forks the keeper, and the keeper the rank.
                lines = [each.cmdline() for each in [process, *process.parents()[:3]]]
                if lines[0] == lines[1] == lines[2] != lines[3] and self.program[0] in lines[0]:
                    process.kill()

    def terminate(self, node: int) -> None:
        """Send SIGTERM to a node's launcher."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if len(words) > 1 and words[1].endswith(("/paceline", "/torchrun")):
                    parent = process.parent()
                    if parent is None or words != parent.cmdline():
                        process.send_signal(signal.SIGTERM)
                        return

    def rows(self) -> list[dict[str, Any]]:
        """Return the steps so far."""
        path = self.folder / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # a line that is being written
                found.append(json.loads(line))
        return found

    def await_step(self, is_it: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Wait for a step; None if it does not come, or all launchers end."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for row in self.rows():
                if is_it(row):
                    return row
            if all(launched.process.poll() is not None for launched in self.launched.values()):
                return None
            time.sleep(0.05)
        return None

    @property
    def text(self) -> str:
        """The output of all launchers."""
        return "\n".join(f"--- node{n}\n{launched.text}" for n, launched in self.launched.items())


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: of the row.
        count: nodes of the job.
        first: whether it hits the node that is number 0 of the round; else another one.
        do: brings the fault about at a node.
        undo: undoes it after 8 s; None: it stays.
        is_whole: whether all nodes train afterwards.
    """

    name: str
    count: int
    first: bool
    do: Callable[[Job, int], None]
    undo: Callable[[Job, int], None] | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class Reading:
    """The result of one try of a fault: `without_s` is None if the job was lost."""

    without_s: float | None
    to_ranks_s: float = 0.0
    import_s: float = 0.0
    lost_steps: int = 0
    since_s: float = 0.0
    text: str = field(default="", repr=False)


def _suspend(job: Job, node: int) -> None:
    job.each_process(node, psutil.Process.suspend)


def _reset_and_refuse(job: Job, node: int) -> None:
    job.nodes.refuse(node)
    job.nodes.reset(node)


FAULTS = [
    Fault("number 1 of 2 killed", 2, False, Job.kill),
    Fault("number 1 of 2 killed, back after 8 s", 2, False, Job.kill, Job.start),
    Fault("number 1 of 2, power cut", 2, False, Job.power_off),
    Fault("number 1 of 2 gets SIGTERM", 2, False, Job.terminate),
    Fault("number 0 of 2 killed", 2, True, Job.kill),
    Fault("number 0 of 2 gets SIGTERM", 2, True, Job.terminate),
    Fault("a rank of 2 killed", 2, False, Job.kill_rank, is_whole=True),
    Fault("one of 3 killed", 3, False, Job.kill),
    Fault("one of 3, power cut", 3, False, Job.power_off),
    Fault("one of 3 cut off", 3, False, lambda job, node: job.nodes.cut(node)),
    Fault(
        "one of 3 cut off for 8 s",
        *(3, False, lambda job, node: job.nodes.cut(node), lambda job, node: job.nodes.heal(node)),
    ),
    Fault("connections of one of 3 reset", 3, False, lambda job, node: job.nodes.reset(node), is_whole=True),
    Fault(
        "one of 3 reset and refused for 8 s",
        *(3, False, _reset_and_refuse, lambda job, node: job.nodes.admit(node)),
    ),
    Fault("one of 3 stopped (SIGSTOP)", 3, False, _suspend),
    Fault("number 0 of 3 killed", 3, True, Job.kill),
    Fault("number 0 of 3 killed, back after 8 s", 3, True, Job.kill, Job.start),
    Fault("number 0 of 3, power cut", 3, True, Job.power_off),
    Fault("number 0 of 3 cut off", 3, True, lambda job, node: job.nodes.cut(node)),
]


class Bench:
    """Tries faults on jobs that survive them if possible: only lost nodes are started again."""

    def __init__(self, launcher: Callable[..., list[str]], limit_s: float, store: str = "folder") -> None:
        self._launcher, self._limit_s, self._store = launcher, limit_s, store
        self._stack = ExitStack()
        self._job: Job | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, fault: Fault) -> Reading:
        """Try a fault once, on all nodes of its job."""
        reading = self._try(self._prepare(fault.count), fault)
        if reading.without_s is None:
            self._stack.close()
            self._job = None
        return reading

    def _prepare(self, count: int) -> Job | None:
        job = self._job
        if job is not None and job.count == count and job.restore():
            return job
        self._stack.close()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-chaos-")))
        self._job = job = self._stack.enter_context(
            Job(folder, count, f"1:{count}", self._launcher, store=self._store)
        )
        return job if job.restore() else None

    def _try(self, job: Job | None, fault: Fault) -> Reading:
        if job is None:
            assert self._job is not None
            return Reading(None, text=f"never began:\n{self._job.text}")
        ready = job.rows()[-1]
        first = int(ready["host"].removeprefix("node"))
        node = first if fault.first else next(n for n in reversed(range(job.count)) if n != first)
        fault_s = time.monotonic()
        fault.do(job, node)
        if fault.undo is not None:
            time.sleep(8)
            fault_s = time.monotonic()
            fault.undo(job, node)
        size = job.count if fault.undo or fault.is_whole else job.count - 1
        row = job.await_step(
            lambda row: row["size"] == size and row["born_s"] > max(fault_s, ready["born_s"]), self._limit_s
        )
        if row is None:
            return Reading(None, text=job.text)
        rows = job.rows()
        check_one_history(rows)
        last = [each for each in rows if each["born_s"] < row["born_s"]][-1]
        began_s = max(last["at_s"], fault_s)  # when a node comes back, the others go on for a while
        return Reading(
            row["at_s"] - began_s,
            row["born_s"] - began_s,
            row["imported_s"] - row["born_s"],
            max(0, last["step"] - row["step"] + 1),
            row["at_s"] - fault_s,
            job.text,
        )


def check_one_history(rows: list[dict[str, Any]]) -> None:
    """Check that no world takes a step once a later one has taken one; its rank 0 logs all of its steps."""
    worlds = [(row["host"], row["born_s"]) for row in rows]
    begins = [world for before, world in pairwise([None, *worlds]) if world != before]
    assert len(begins) == len(set(begins)), f"two worlds train: {begins}"


def describe(fault: Fault, readings: Sequence[Reading]) -> str:
    """Return a row of the table."""
    good = [reading for reading in readings if reading.without_s is not None]
    lost = len(readings) - len(good)
    head = f"{fault.name:36} {len(readings):2}  {lost:2}"
    if not good:
        return head
    seconds = [reading.without_s or 0.0 for reading in good]
    medians = [
        statistics.median(getattr(reading, name) for reading in good)
        for name in ("to_ranks_s", "import_s", "since_s", "lost_steps")
    ]
    return (
        f"{head}  {statistics.median(seconds):6.1f}  {max(seconds):6.1f}  "
        "{:8.1f}  {:6.2f}  {:6.1f}  {:5.0f}".format(*medians)
    )


_HEAD = (
    f"{'':36}  n lost  median   worst  to ranks  import   since  steps\n"
    f"{'':36}     jobs       s       s         s       s   fault   lost"
)


def write_rows(path: Path, name: str, rows: Sequence[str]) -> None:
    """Put rows in the place of those of the same faults, in the launcher's part of the table."""
    blocks = path.read_text().rstrip().split("\n\n") if path.exists() else []
    parts = {block.splitlines()[0]: block.splitlines()[3:] for block in blocks if block}
    found = {row[:36].rstrip(): row for row in [*parts.get(name, []), *rows]}
    parts[name] = [found[fault.name] for fault in FAULTS if fault.name in found]
    text = "\n\n".join("\n".join([head, _HEAD, *lines]) for head, lines in sorted(parts.items()))
    path.write_text(text + "\n")


def measure_flapping(launcher: Callable[..., list[str]], seconds: int, store: str) -> tuple[int, int]:
    """Return the steps of so many seconds on two nodes, undisturbed, and with a link down for 2 s in 10."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-chaos-")))
        job = stack.enter_context(Job(folder, 2, "1:2", launcher, store=store))
        assert job.restore(), job.text
        reached = [job.rows()[-1]["step"]]
        time.sleep(seconds)
        reached.append(job.rows()[-1]["step"])
        for _ in range(seconds // 10):
            job.nodes.cut(1)
            time.sleep(2)
            job.nodes.heal(1)
            time.sleep(8)
        rows = job.rows()
        check_one_history(rows)
        reached.append(rows[-1]["step"])  # what is taken again counts once
    return reached[1] - reached[0], reached[2] - reached[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the requested faults; return 1 if a job was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="tries per row")
    parser.add_argument("--match", default="", help="only rows with these words")
    parser.add_argument("--torchrun", action="store_true", help="under torchrun, with its defaults")
    parser.add_argument(
        "--limit", type=float, default=_LIMIT_S, help="seconds after which a job counts as lost"
    )
    parser.add_argument("--store", choices=["c10d", "etcd", "folder"], default="folder")
    parser.add_argument("--random", type=int, metavar="N", help="N random faults of a recipe that trains")
    parser.add_argument("--seed", type=int, default=1, help="of --random and --partitions")
    parser.add_argument("--minutes", type=float, default=30, help="after which no job of --random begins")
    parser.add_argument("--flapping", type=int, metavar="SECONDS", help="under a link that comes and goes")
    parser.add_argument("--partitions", type=int, metavar="N", help="N resets and partitions, disks apart")
    parser.add_argument("--verbose", action="store_true", help="print the output of lost jobs")
    args = parser.parse_args(argv)
    if (reason := why_no_nodes()) is not None:
        print(reason)
        return 2
    if args.random is not None:
        from tests.chaos.random_nodes import measure_random

        return measure_random(args.random, args.seed, args.minutes, args.store)
    if args.partitions is not None:
        from tests.chaos.partitions import measure_partitions

        return measure_partitions(args.partitions, args.seed)
    launcher = torchrun if args.torchrun else paceline_run
    store = "c10d" if args.torchrun else args.store
    name = "torchrun, defaults" if args.torchrun else f"paceline run, {store}"
    if args.flapping is not None:
        steady, flapping = measure_flapping(launcher, args.flapping, store)
        row = f"{name:24} {args.flapping} s: {steady} steps, with a flapping link {flapping}"
        print(row)
        others = FLAPPING.read_text().splitlines() if FLAPPING.exists() else []
        kept = [other for other in others if not other.startswith(f"{name:24}")]
        FLAPPING.write_text("\n".join(sorted([*kept, row])) + "\n")
        return 0 if flapping >= steady / 2 else 1
    print(f"{name}\n{_HEAD}", flush=True)
    rows, is_good = [], True
    with Bench(launcher, args.limit, store) as bench:
        for fault in FAULTS:
            # The job of c10d ends with the node that holds the store, which is number 0 at first. A node
            # that is cut off still reaches a folder here, so it goes on beating.
            is_none = (fault.first and store == "c10d") or ("cut off" in fault.name and store == "folder")
            if args.match not in fault.name or is_none:
                continue
            readings = [bench.measure(fault) for _ in range(args.times)]
            rows.append(describe(fault, readings))
            print(rows[-1], flush=True)
            for reading in readings:
                is_good &= reading.without_s is not None
                if args.verbose and reading.without_s is None:
                    print(reading.text, flush=True)
    write_rows(TABLE, name, rows)
    return 0 if is_good or args.torchrun else 1


if __name__ == "__main__":
    sys.exit(main())
