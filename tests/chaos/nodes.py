"""Measures what the loss and the return of nodes costs: `python -m tests.chaos.nodes [--times 3]`.

The nodes are network namespaces with processes of their own. A script takes a step every 0.1 s and saves
every fifth one. Each row is a fault; its seconds are those without a step, until the first one on the nodes
that should go on. `--torchrun` runs the same under torchrun with its defaults. The table goes to nodes.txt.
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
from pathlib import Path
from typing import Any

import psutil

from tests.launching.launched import Launched, paceline_run, script, torchrun
from tests.launching.nodes import Nodes, why_no_nodes

TABLE = Path(__file__).with_name("nodes.txt")
_START_S = 60.0
_LIMIT_S = 90.0


class Job:
    """A job on nodes, and what it has done so far."""

    def __init__(self, folder: Path, count: int, nnodes: str, launcher: Callable[..., list[str]]) -> None:
        self.folder, self.count, self.nnodes, self.launcher = folder, count, nnodes, launcher
        self.launched: dict[int, Launched] = {}
        self._starts = 0

    def __enter__(self) -> Job:
        self._stack = ExitStack()
        self.nodes = self._stack.enter_context(Nodes(self.count))
        return self

    def __exit__(self, *error: object) -> None:
        for launched in self.launched.values():
            launched.process.kill()  # and with it all processes of its node
        self._stack.close()

    def start(self, node: int) -> None:
        """Starts a node's launcher."""
        words = ["--nnodes", self.nnodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.nodes.address(0)}:29501"]
        words += ["--rdzv-id", "chaos", *(["--local-addr", self.nodes.address(node)])]
        command = self.launcher(*words, script("steps.py"), str(self.folder))
        self._starts += 1
        launched = Launched(
            self.folder / f"node{node}-{self._starts}",
            command,
            env={"GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"},
            around=lambda inner: self.nodes.powered(self.nodes.command(node, inner)),
        )
        self.launched[node] = self._stack.enter_context(launched)

    def kill(self, node: int) -> None:
        """SIGKILL of all processes of a node; its machine stays reachable."""
        self.launched[node].process.kill()

    def power_off(self, node: int) -> None:
        """Takes a node away without a word to the others."""
        self.nodes.cut(node)
        self.kill(node)

    def each_process(self, node: int, call: Callable[[psutil.Process], None]) -> None:
        """Does something to all processes of a node."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                call(process)

    def kill_rank(self, node: int) -> None:
        """SIGKILL of a node's rank alone."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if script("steps.py") in words and not process.children():
                    process.kill()

    def terminate(self, node: int) -> None:
        """SIGTERM of a node's launcher."""
        for process in self.launched[node].processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if len(words) > 1 and words[1].endswith(("/paceline", "/torchrun")):
                    parent = process.parent()
                    if parent is None or words != parent.cmdline():
                        process.send_signal(signal.SIGTERM)
                        return

    def rows(self) -> list[dict[str, Any]]:
        """The steps so far."""
        path = self.folder / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # a line that is being written
                found.append(json.loads(line))
        return found

    def await_step(self, is_it: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Waits for a step; None if it does not come, or all launchers end."""
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
        """What all launchers have printed."""
        return "\n".join(f"--- node{n}\n{launched.text}" for n, launched in self.launched.items())


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: of the row.
        count: nodes.
        nnodes: the flag.
        do: brings the fault about.
        size: the world's size afterwards.
        then: what comes back later, and after how many seconds.
    """

    name: str
    count: int
    nnodes: str
    do: Callable[[Job], None]
    size: int
    late: Sequence[int] = ()
    then: Callable[[Job], None] | None = None
    then_after_s: float = 0.0


@dataclass
class Reading:
    """One try of a fault: `without_s` is None where the job was lost."""

    without_s: float | None
    detect_s: float = 0.0
    import_s: float = 0.0
    lost_steps: int = 0
    since_s: float = 0.0
    text: str = field(default="", repr=False)


FAULTS = [
    Fault("node 1 of 2 killed", 2, "1:2", lambda job: job.kill(1), 1),
    Fault("node 1 of 2, power cut", 2, "1:2", lambda job: job.power_off(1), 1),
    Fault("node 0 of 2 killed", 2, "1:2", lambda job: job.kill(0), 1),
    Fault("node 2 of 3 killed", 3, "1:3", lambda job: job.kill(2), 2),
    Fault("node 0 of 3 killed", 3, "1:3", lambda job: job.kill(0), 2),
    Fault("node 0 of 3, power cut", 3, "1:3", lambda job: job.power_off(0), 2),
    Fault("a rank killed, 2 nodes", 2, "2", lambda job: job.kill_rank(1), 2),
    Fault("node 1 of 3 cut off", 3, "1:3", lambda job: job.nodes.cut(1), 2),
    Fault("node 1 of 3 stopped", 3, "1:3", lambda job: job.each_process(1, lambda p: p.suspend()), 2),
    Fault("node 1 of 2 added", 2, "1:2", lambda job: job.start(1), 2, late=[1]),
    Fault("node 1 of 2 gets SIGTERM", 2, "1:2", lambda job: job.terminate(1), 1),
    Fault("node 0 of 2 gets SIGTERM", 2, "1:2", lambda job: job.terminate(0), 1),
    Fault(
        "node 1 of 2 killed, back after 8 s",
        *(2, "1:2", lambda job: job.kill(1), 2),
        then=lambda job: job.start(1),
        then_after_s=8.0,
    ),
    Fault(
        "node 0 of 3 killed, back after 8 s",
        *(3, "1:3", lambda job: job.kill(0), 3),
        then=lambda job: job.start(0),
        then_after_s=8.0,
    ),
    Fault(
        "node 1 of 3 cut off for 8 s",
        *(3, "1:3", lambda job: job.nodes.cut(1), 3),
        then=lambda job: job.nodes.heal(1),
        then_after_s=8.0,
    ),
]


def measure(fault: Fault, launcher: Callable[..., list[str]], limit_s: float) -> Reading:
    """Tries a fault once."""
    with (
        tempfile.TemporaryDirectory(prefix="nodes-chaos-") as name,
        Job(Path(name), fault.count, fault.nnodes, launcher) as job,
    ):
        early = [node for node in range(fault.count) if node not in fault.late]
        for node in early:
            job.start(node)
        ready = job.await_step(lambda row: row["size"] == len(early) and row["step"] >= 7, _START_S)
        if ready is None:
            return Reading(None, text=f"never began:\n{job.text}")
        time.sleep(1.5)
        fault_s = time.monotonic()
        fault.do(job)
        if fault.then is not None:
            time.sleep(fault.then_after_s)
            fault_s = time.monotonic()
            fault.then(job)
        row = job.await_step(
            lambda row: row["size"] == fault.size and row["born_s"] > max(fault_s, ready["born_s"]), limit_s
        )
        if row is None:
            return Reading(None, text=job.text)
        rows = job.rows()
        _check_one_history(rows)
        last = [each for each in rows if each["born_s"] < row["born_s"]][-1]
        began_s = max(last["at_s"], fault_s)  # when a node is added, the others go on for a while
        return Reading(
            row["at_s"] - began_s,
            row["born_s"] - began_s,
            row["imported_s"] - row["born_s"],
            max(0, last["step"] - row["step"] + 1),
            row["at_s"] - fault_s,
            job.text,
        )


def _check_one_history(rows: list[dict[str, Any]]) -> None:
    """Once ranks of a later start have taken a step, none of an earlier one does."""
    newest_s = 0.0
    for row in rows:
        assert row["born_s"] >= newest_s - 1.0, f"two worlds train: {row} after ranks born at {newest_s}"
        newest_s = max(newest_s, row["born_s"])


def describe(fault: Fault, readings: Sequence[Reading]) -> str:
    """A row of the table."""
    good = [reading for reading in readings if reading.without_s is not None]
    lost = len(readings) - len(good)
    head = f"{fault.name:36} {len(readings):2}  {lost:2}"
    if not good:
        return head
    seconds = [reading.without_s or 0.0 for reading in good]
    medians = [
        statistics.median(getattr(reading, name) for reading in good)
        for name in ("detect_s", "import_s", "since_s", "lost_steps")
    ]
    return (
        f"{head}  {statistics.median(seconds):6.1f}  {max(seconds):6.1f}  "
        "{:8.1f}  {:6.2f}  {:6.1f}  {:5.0f}".format(*medians)
    )


_HEAD = (
    f"{'':36}  n lost  median   worst  to ranks  import   since  steps\n"
    f"{'':36}     jobs       s       s         s       s   fault   lost"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for; 1 where a job was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="tries per row")
    parser.add_argument("--match", default="", help="only rows with these words")
    parser.add_argument("--torchrun", action="store_true", help="under torchrun, with its defaults")
    parser.add_argument(
        "--limit", type=float, default=_LIMIT_S, help="seconds after which a job counts as lost"
    )
    parser.add_argument("--verbose", action="store_true", help="print the output of lost jobs")
    args = parser.parse_args(argv)
    if (reason := why_no_nodes()) is not None:
        print(reason)
        return 2
    launcher = torchrun if args.torchrun else paceline_run
    name = "torchrun, defaults" if args.torchrun else "paceline run, defaults"
    print(f"{name}\n{_HEAD}", flush=True)
    rows, is_good = [], True
    for fault in FAULTS:
        if args.match not in fault.name:
            continue
        readings = [measure(fault, launcher, args.limit) for _ in range(args.times)]
        rows.append(describe(fault, readings))
        print(rows[-1], flush=True)
        for reading in readings:
            is_good &= reading.without_s is not None
            if args.verbose and reading.without_s is None:
                print(reading.text, flush=True)
    if not args.match:
        blocks = TABLE.read_text().split("\n\n") if TABLE.exists() else []
        kept = [block.rstrip() for block in blocks if not block.startswith(name)]
        TABLE.write_text("\n\n".join(sorted([*kept, "\n".join([name, _HEAD, *rows])])) + "\n")
    return 0 if is_good or args.torchrun else 1


if __name__ == "__main__":
    sys.exit(main())
