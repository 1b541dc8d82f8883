"""Random faults of nodes, drawn from a seed: `python -m tests.chaos.nodes --random 60 --seed 1`.

Each job trains a recipe on three nodes, `dp_replicate` and `dp_shard` in turn, under 15 faults, and must end
with the bits of one process. Faults: a node is killed, loses its power, is cut off, is stopped, is asked to
leave, or loses its rank. Between them nodes come back. No job begins after `--minutes`, and one that still
takes steps five minutes after its last fault is not judged. The summary goes to a file per store.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.checkpoint import find_checkpoint, hash_stored, open_usable
from tests.chaos.nodes import Job
from tests.launching.launched import paceline_run, script
from tests.launching.nodes import nodes_left
from tests.train.cases import text_recipe

SUMMARY = "nodes-random-{store}.txt"
LAYOUTS = ("dp_replicate", "dp_shard")
FAULTS_PER_JOB = 15
NODES = 3
_MOST_LOSSES = 4
EPOCHS = 40
PACE_S = 0.8  # so that no job ends before its faults do
# For the last steps: without one for this long, and all of them.
_END_S = 120.0
_MOST_END_S = 300.0
_STEP_S = 60.0
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)


@dataclass
class Tally:
    """The faults that were made, and their effects.

    Attributes:
        faults, returns: how often each was done.
        sizes: steps that were taken, by world size.
        retaken: steps that were taken again after a loss.
        wrong: whatever a job must not do.
        late: jobs that still took steps when their time was over, and were not judged.
    """

    faults: Counter[str] = field(default_factory=Counter)
    returns: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    retaken: int = 0
    jobs: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


class Faults:
    """The faults of one job, and the state of its nodes."""

    def __init__(self, job: Job, chance: random.Random, tally: Tally) -> None:
        self._job, self._chance, self._tally = job, chance, tally
        self.state = dict.fromkeys(range(NODES), "up")
        self.was_cut: set[int] = set()  # since its start
        self.losses = dict.fromkeys(range(NODES), 0)
        self.log: list[str] = []

    def strike(self) -> None:
        """Do one fault to a node that is up; it is not the last one that ends."""
        self._look()
        up = [node for node, state in self.state.items() if state == "up"]
        ends = ["killed", "power cut", "asked to leave"] if len(up) > 1 else []
        fault = self._chance.choice([*ends, "cut off", "stopped", "rank killed"])
        # A node that was lost too often is refused, and with c10d, node 0 has the store.
        store_node = 0 if self._job.store == "c10d" else None
        may_lose = [node for node in up if self.losses[node] < _MOST_LOSSES and node != store_node]
        if fault != "rank killed" and not may_lose:
            fault = "rank killed"
        node = self._chance.choice(up if fault == "rank killed" else may_lose)
        self.losses[node] += fault != "rank killed"
        self._note(f"node{node} {fault}")
        self._tally.faults[fault] += 1
        job = self._job
        if fault == "killed":
            job.kill(node)
            self.state[node] = "dead"
        elif fault == "power cut":
            job.power_off(node)
            self.state[node] = "cut and dead"
        elif fault == "asked to leave":
            job.terminate(node)
            self.state[node] = "leaving"
        elif fault == "cut off":
            job.nodes.cut(node)
            self.state[node] = "cut"
            self.was_cut.add(node)
        elif fault == "stopped":
            job.each_process(node, psutil.Process.suspend)
            self.state[node] = "stopped"
        else:
            job.kill_rank(node)

    def make_room(self) -> None:
        """Bring nodes back, as often as chance has it, and until one is up that a fault can hit."""
        while self._chance.random() < 0.6 or "up" not in self.state.values():
            if not self.bring_back():
                if "up" in self.state.values():
                    return
                time.sleep(0.2)

    def bring_back(self) -> bool:
        """Undo one fault; return whether there was one to undo."""
        self._look()
        away = [node for node, state in self.state.items() if state not in ("up", "leaving")]
        if not away:
            return False
        node = self._chance.choice(away)
        state, self.state[node] = self.state[node], "up"
        if state == "stopped":
            self._job.each_process(node, psutil.Process.resume)
        if state.startswith("cut"):
            self._job.nodes.heal(node)
        if state.endswith("dead"):
            self._job.start(node)
            self.was_cut.discard(node)
        what = {"stopped": "goes on", "cut": "link back"}.get(state, "started again")
        self._note(f"node{node} {what}")
        self._tally.returns[what] += 1
        return True

    def restore(self) -> None:
        """Bring all nodes back."""
        end_s = time.monotonic() + _STEP_S
        while time.monotonic() < end_s and any(state != "up" for state in self.state.values()):
            if not self.bring_back():
                time.sleep(0.2)

    def _look(self) -> None:
        """Record the launchers that have ended."""
        for node, launched in self._job.launched.items():
            code = launched.process.poll()
            if code is None or self.state[node] not in ("leaving", "up"):
                continue
            self._note(f"node{node} has ended with {code}")
            # With c10d, a node that was cut off from the store leaves, and may be started again.
            may_leave = self._job.store == "c10d" and node in self.was_cut
            if (self.state[node] == "up" and not may_leave) or code != 75:
                self._tally.wrong.append(f"node{node} ended with {code}:\n{launched.text}")
            self.state[node] = "dead"

    def _note(self, what: str) -> None:
        self.log.append(f"{time.monotonic():.2f} {what}")


def run_random(
    count: int,
    seed: int,
    per_job: int = FAULTS_PER_JOB,
    after: Callable[[Tally, int], None] = lambda *_: None,
    most_s: float = float("inf"),
    store: str = "folder",
) -> Tally:
    """Do so many faults, in as many jobs as it takes; `after` each, it calls with the number so far.

    No job begins after `most_s`.
    """
    tally, number, done = Tally(), 0, 0
    end_s = time.monotonic() + most_s
    with tempfile.TemporaryDirectory(prefix="nodes-random-") as scratch:
        alone = train_alone(Path(scratch) / "alone")
        while done < count and time.monotonic() < end_s:
            layout = LAYOUTS[number % len(LAYOUTS)]
            wanted = min(per_job, count - done)
            done += wanted
            begin_s = time.monotonic()
            before, before_late = len(tally.wrong), len(tally.late)
            folder = Path(scratch) / f"job-{number}"
            log = _run_job(folder, layout, random.Random(f"{seed}-{number}"), wanted, alone, tally, store)
            tally.jobs[layout] += 1
            is_good = len(tally.wrong) == before
            verdict = "WRONG" if not is_good else "not judged" if len(tally.late) > before_late else "good"
            took_s = time.monotonic() - begin_s
            print(f"job {number} {layout}: {wanted} faults, {took_s:.0f} s, {verdict}", flush=True)
            if not is_good:
                print("\n".join([*log, *tally.wrong[before:]]), flush=True)
            number += 1
            after(tally, done)
    return tally


@dataclass(frozen=True)
class Alone:
    """The results of one process: the hash of its weights, and by step its epoch and its samples' places."""

    hash: str
    places: dict[int, tuple[int, list[int]]]


def _write_recipe(folder: Path, layout: str | None) -> Path:
    recipe = text_recipe(folder / "text")
    del recipe["train"]["steps"]
    recipe["train"] |= {"epochs": EPOCHS, "reduction": "exact", "timeout_s": 60, "threads_per_rank": 1}
    recipe["checkpoint"] = {"every": 4}
    if layout is not None:
        recipe["layout"] = {layout: "auto"}
    lines = []
    for section, table in recipe.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def list_program(folder: Path, layout: str | None, pace_s: float = PACE_S) -> list[str]:
    """Return the script that trains in a folder, with its arguments."""
    train = ["train", str(_write_recipe(folder, layout)), "--out", str(folder / "run")]
    return [script("logged.py"), str(folder), str(pace_s), *train]


def train_alone(folder: Path) -> Alone:
    """Train in one process, without faults."""
    folder.mkdir(exist_ok=True)
    words = list_program(folder, None, 0.0)
    path = str(Path(__file__).parents[2])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        paceline_run(*words), capture_output=True, text=True, env=environ, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(folder)
    places = {row["step"]: (row["epoch"], sorted(row["places"])) for row in rows}
    used = Counter((epoch, place) for epoch, there in places.values() for place in there)
    sizes = Counter(epoch for epoch, _ in used)
    assert set(used.values()) == {1}
    assert len(sizes) == EPOCHS
    assert len(set(sizes.values())) == 1
    return Alone(_hash(folder / "run"), places)


def _run_job(
    folder: Path, layout: str, chance: random.Random, count: int, alone: Alone, tally: Tally, store: str
) -> list[str]:
    folder.mkdir()
    program = list_program(folder, layout)
    flags = ["--max-restarts", "50"]
    with ExitStack() as stack:
        job = stack.enter_context(Job(folder, NODES, f"1:{NODES}", paceline_run, program, flags, store))
        for node in range(NODES):
            job.start(node)
        faults = Faults(job, chance, tally)
        _await_row(folder, lambda row: row["size"] == NODES, 90.0)
        for _ in range(count):
            faults.make_room()
            faults.strike()
            _pause(folder, chance)
        faults.restore()
        (folder / "go").touch()
        codes = _await_end(job)
        if None in codes.values() and _is_training(job):
            tally.late.append(f"{layout}: at step {read_rows(folder)[-1]['step']} of {len(alone.places)}")
            return faults.log
        if codes != dict.fromkeys(range(NODES), 0):
            tally.wrong.append(f"{layout}: the launchers ended with {codes}:\n{job.text}")
        for node, launched in job.launched.items():
            if left := launched.find_left(5, ["torchinductor"]):
                tally.wrong.append(f"{layout}: node{node} left {left}")
    if left := nodes_left():
        tally.wrong.append(f"{layout}: namespaces left: {', '.join(left)}")
    judge(folder, alone, tally, layout)
    return faults.log


def _pause(folder: Path, chance: random.Random) -> None:
    """Wait for a while; half of the time until the job takes a step again."""
    begin_s = time.monotonic()
    time.sleep(chance.choice(_PAUSES_S))
    if chance.random() < 0.5:
        _await_row(folder, lambda row: row["at_s"] > begin_s + 0.2, 8.0)


def _await_row(folder: Path, is_it: Callable[[dict[str, Any]], bool], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if any(is_it(row) for row in read_rows(folder)):
            return True
        time.sleep(0.1)
    return False


def _is_training(job: Job) -> bool:
    """Return whether a step was taken lately."""
    rows = read_rows(job.folder)
    return bool(rows) and time.monotonic() - rows[-1]["at_s"] < _END_S / 2


def _await_end(job: Job) -> dict[int, int | None]:
    """Wait for all launchers, as long as steps are taken; None for one that runs on."""
    most_s = time.monotonic() + _MOST_END_S
    end_s, steps = time.monotonic() + _END_S, 0
    while time.monotonic() < min(end_s, most_s):
        if all(launched.process.poll() is not None for launched in job.launched.values()):
            break
        if (now := len(read_rows(job.folder))) > steps:
            end_s, steps = time.monotonic() + _END_S, now
        time.sleep(0.5)
    return {node: launched.process.poll() for node, launched in job.launched.items()}


def judge(folder: Path, alone: Alone, tally: Tally, layout: str) -> None:
    """Compare a finished job with one process."""
    try:
        ours = _hash(folder / "run")
    except Exception as error:
        tally.wrong.append(f"{layout}: no checkpoint at the end: {error}")
        return
    if ours != alone.hash:
        tally.wrong.append(f"{layout}: hash {ours[:16]}, and {alone.hash[:16]} of one process")
    steps = [row["step"] for row in _read(folder / "run" / "metrics.jsonl")]
    if steps != list(range(1, len(alone.places) + 1)):
        tally.wrong.append(f"{layout}: steps in the metrics are {steps}")
    rows = read_rows(folder)
    # Of a step that was taken again after a loss, the last time counts.
    last = {row["step"]: row["round"] for row in sorted(rows, key=lambda row: row["at_s"])}
    times: dict[int, set[str]] = {}
    for row in rows:
        times.setdefault(row["step"], set()).add(row["round"])
        tally.sizes[row["size"]] += 1
    tally.retaken += sum(len(rounds) - 1 for rounds in times.values())
    tally.rounds += len({row["round"] for row in rows})
    for step, (epoch, places) in alone.places.items():
        counted = [row for row in rows if row["step"] == step and row["round"] == last.get(step)]
        theirs = sorted(place for row in counted for place in row["places"])
        if theirs != places or any(row["epoch"] != epoch for row in counted):
            tally.wrong.append(f"{layout}: step {step} used {theirs} of epoch {epoch}, and not {places}")


def _hash(run: Path) -> str:
    return hash_stored(open_usable(find_checkpoint(run)).model)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that `logged.py` has written."""
    return _read(folder / "steps")


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a line that is being written
            found.append(json.loads(line))
    return found


def describe(tally: Tally, count: int, seed: int, seconds: float) -> str:
    """Return the summary, as text."""

    def listed(counts: Counter[Any]) -> str:
        return ", ".join(f"{key} {number}" for key, number in sorted(counts.items()))

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines: Sequence[str] = [
        f"{count} random faults, seed {seed}: {sum(tally.jobs.values())} jobs ({listed(tally.jobs)}), "
        f"{seconds / 60:.1f} min, load {load}",
        f"  faults            {listed(tally.faults)}",
        f"  nodes that return {listed(tally.returns)}",
        f"  rounds            {tally.rounds}",
        f"  steps by world    {listed(tally.sizes)}",
        f"  steps taken again {tally.retaken}",
        f"  wrong             {len(tally.wrong)}",
        f"  not judged        {len(tally.late)} jobs" + "".join(f"; {each}" for each in tally.late),
        "all good: the hash of one process, each sample once per epoch, no step twice, nothing left"
        if not tally.wrong
        else "\n".join(f"  {each.splitlines()[0]}" for each in tally.wrong),
    ]
    return "\n".join(lines) + "\n"


def measure_random(count: int, seed: int, minutes: float, store: str) -> int:
    """Run and write the summary; 1 where something was wrong, or not all faults were done and judged."""
    begin_s, num_done = time.monotonic(), 0
    file = Path(__file__).with_name(SUMMARY.format(store=store))

    def summarize(tally: Tally, done: int) -> None:
        """Write the summary after each job, so that a stopped run leaves its results."""
        nonlocal num_done
        num_done = done
        file.write_text(describe(tally, done, seed, time.monotonic() - begin_s))

    tally = run_random(count, seed, after=summarize, most_s=60 * minutes, store=store)
    print(file.read_text(), end="")
    if num_done < count:
        print(f"{num_done} of {count} faults: the time was over (--minutes {minutes:g})")
    return 1 if tally.wrong or tally.late or num_done < count else 0
