"""Random resets and partitions of nodes with own disks: `python -m tests.chaos.nodes --partitions 40`.

Three nodes take steps over an etcd on a fourth one. Each fault is drawn from the seed and lasts for up to
20 s: a node's connections are reset, also with later ones refused; a link is down, or loses what its node
sends; the network parts in two; or two nodes that both reach the etcd reject or drop what comes from each
other. After each, all three must train together again, and no world may take a step after a later one has.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.nodes import Job, check_one_history
from tests.launching.launched import paceline_run

SUMMARY = Path(__file__).with_name("partitions.txt")
NODES = 3
PER_JOB = 4  # a node that is lost five times is refused
_LASTS_S = (0.5, 2.0, 5.0, 10.0, 20.0)
_TOGETHER_S = 120.0


@dataclass
class Tally:
    """The faults that were made, and what came of them; `wrong` is empty if nothing was."""

    done: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    worlds: int = 0
    wrong: str = ""

    def describe(self, seed: int) -> str:
        """Return the summary, as text."""
        waits_s = sorted(self.waits_s) or [0.0]
        median_s = waits_s[len(waits_s) // 2]
        sizes = ", ".join(f"{size} {self.sizes[size]}" for size in sorted(self.sizes))
        return (
            f"{self.done.total()} resets and partitions of three nodes with own disks, etcd, seed {seed}\n"
            + "".join(f"  {number:2} {name}\n" for name, number in sorted(self.done.items()))
            + f"  {self.worlds} worlds, steps by world {sizes}\n"
            f"  all three together again after {median_s:.1f} s, at most {waits_s[-1]:.1f} s\n"
            f"  {self.wrong.splitlines()[0] if self.wrong else '0 split'}\n"
        )


def list_faults(job: Job, draw: random.Random) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return the faults of a drawn node or pair, by name: what does each, and what undoes it."""
    nodes, node = job.nodes, draw.randrange(NODES)
    other = draw.choice([each for each in range(NODES) if each != node])

    def refuse() -> None:
        nodes.refuse(node)
        nodes.reset(node)

    def block(verdict: str) -> tuple[Callable[[], None], Callable[[], None]]:
        return partial(nodes.block, node, other, verdict), partial(nodes.unblock, node, other)

    return {
        "connections reset": (partial(nodes.reset, node), lambda: None),
        "reset and refused": (refuse, partial(nodes.admit, node)),
        "link down": (partial(nodes.cut, node), partial(nodes.heal, node)),
        "what a node sends is lost": (partial(nodes.mute, node), partial(nodes.unmute, node)),
        "network in halves": (
            partial(nodes.split, draw.sample(range(NODES), draw.choice([1, 2]))),
            nodes.join,
        ),
        "two nodes reject each other": block("reject with tcp reset"),
        "two nodes drop each other's packets": block("drop"),
    }


def list_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps on all disks, in the order of their times."""
    found = []
    for path in folder.glob("disk-*/steps.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # a line that is being written
                found.append(json.loads(line))
    return sorted(found, key=lambda row: row["at_s"])


def measure_partitions(count: int, seed: int) -> int:
    """Do so many faults, and write the summary after each; return 1 if something went wrong."""
    draw, tally = random.Random(seed), Tally()
    while not tally.wrong and tally.done.total() < count:
        with tempfile.TemporaryDirectory(prefix="nodes-partitions-") as scratch:
            try:
                _run_job(Path(scratch), draw, min(PER_JOB, count - tally.done.total()), tally)
            except AssertionError as error:
                tally.wrong = str(error)
        SUMMARY.write_text(tally.describe(seed))
    print(tally.wrong or SUMMARY.read_text())
    return 1 if tally.wrong else 0


def _run_job(folder: Path, draw: random.Random, count: int, tally: Tally) -> None:
    """Do so many faults to one job.

    Raises:
        AssertionError: what was wrong.
    """
    flags = ["--max-restarts", "1000"]
    with Job(folder, NODES, f"1:{NODES}", paceline_run, flags=flags, store="etcd") as job:
        for node in range(NODES):
            disk = folder / f"disk-{node}"
            disk.mkdir()
            job.program[1] = str(disk)
            job.start(node)
        await_all(job, 0.0)
        for _ in range(count):
            name, (do, undo) = draw.choice(list(list_faults(job, draw).items()))
            lasts_s = draw.choice(_LASTS_S)
            do()
            time.sleep(lasts_s)
            undo()
            healed_s = time.monotonic()
            tally.done[name] += 1
            tally.waits_s.append(await_all(job, healed_s))
            print(f"{name}, {lasts_s:g} s: together again after {tally.waits_s[-1]:.1f} s", flush=True)
            check_one_history(list_steps(folder))
            time.sleep(draw.choice([0.0, 1.0, 3.0]))
        rows = list_steps(folder)
        check_one_history(rows)
        tally.sizes.update(row["size"] for row in rows)
        tally.worlds += len({(row["host"], row["born_s"]) for row in rows})


def await_all(job: Job, since_s: float) -> float:
    """Wait until all nodes train together after some time; return how long after it."""
    end_s = time.monotonic() + _TOGETHER_S
    while time.monotonic() < end_s:
        for row in list_steps(job.folder):
            if row["size"] == NODES and row["at_s"] > since_s:
                return float(row["at_s"] - since_s)
        for node, launched in job.launched.items():
            assert launched.process.poll() is None, f"node{node} has ended:\n{launched.text}"
        time.sleep(0.2)
    raise AssertionError(f"not together {_TOGETHER_S:g} s later:\n{job.text}")
