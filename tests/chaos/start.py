"""Runs one start of a run, and records what was done to it and what was seen."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.plan import Plan
from tests.chaos.processes import Activity, find_marked, kill, sort_by_role
from tests.chaos.setting import FAULTY, PLAIN, Case, environment

# Operations, bytes and files of one save of this run; a share of them says where in it a fault strikes.
SAVE_OPERATIONS, SAVE_BYTES, SAVE_FILES = 60, 1_227_000, 5
# Tensors that threads of all ranks copy.
COPIED_TENSORS = 80
# A start hangs if its processes want no core for so long; a busy machine makes it slow, but not idle.
_IDLE_S, _LIMIT_S = 100.0, 900.0
_RESUMING = re.compile(r"resuming after\s+step (\d+)")  # a long line is wrapped
_BEGINNING = re.compile(r"parameters on \d+ ranks?")


@dataclass
class Start:
    """The record of one start.

    Attributes:
        mark: its processes' mark.
        nproc: its ranks.
        status: exit code of the command; `None` where it had to be ended because it hung.
        resumed: the step that it reported to go on from; 0 for the beginning, `None` where it did not say.
        killed: role of the process that was killed, or `None`.
        fault: kind of the fault in saving that struck, or `None`.
        saving: the step whose save it struck, if it is known.
        stderr: what the command wrote.
        seconds: how long it took.
    """

    mark: str
    nproc: int
    status: int | None = None
    resumed: int | None = None
    killed: str | None = None
    fault: str | None = None
    saving: int | None = None
    stderr: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def run_start(
    case: Case,
    plan: Plan | None,
    folder: Path,
    mark: str,
    *,
    expected_s: tuple[float, float],
    on_resume: Callable[[int], None] = lambda step: None,
) -> Start:
    """Run the command once, and wait for its end.

    Args:
        case: which run.
        plan: what is done to it; `None` for nothing.
        folder: holds the recipe; the run goes to `out` in it.
        mark: for its processes.
        expected_s: seconds to the first step, and from there to the end.
        on_resume: told of the step that the start says it resumes from, while it goes on.
    """
    start = Start(mark, plan.nproc if plan else case.nproc or 1)
    tmp = folder / "tmp"
    tmp.mkdir(exist_ok=True)
    fault = None
    if plan is not None and plan.when == "save":
        fault = _make_fault(plan, case, folder / f"fired-{mark}")
    command = [*FAULTY, fault.dump()] if fault is not None else PLAIN
    log, metrics = folder / f"stderr-{mark}.txt", folder / "out/metrics.jsonl"
    changed = _changed(metrics)
    begin_s = time.monotonic()
    activity = Activity(mark)
    strike_s = None
    if plan is not None and plan.when == "start":
        strike_s = begin_s + plan.delay * sum(expected_s) * 0.5
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, *case.words("out", start.nproc, plan.layout if plan else "")],
            cwd=folder,
            env=environment(mark, tmp),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
        while process.poll() is None:
            now_s = time.monotonic()
            if start.resumed is None:
                start.resumed = _read_resumed(log)
                if start.resumed is not None:
                    on_resume(start.resumed)
            # The first step of a start changes the file: what a former one wrote too much is cut away.
            began = start.resumed is not None and _changed(metrics) not in ((0, 0), changed)
            if plan is not None and plan.when == "training" and strike_s is None and began:
                strike_s = now_s + plan.delay * expected_s[1]
            if plan is not None and strike_s is not None and now_s >= strike_s and start.killed is None:
                start.killed = strike(plan.victim, process.pid, mark, tmp)
                strike_s = None if start.killed else now_s + 0.2  # that process was not there yet
            if activity.measure_idle_s() > _IDLE_S or now_s - begin_s > _LIMIT_S:
                start.notes.append("hung")
                kill(p.pid for p in find_marked(mark))
                break
            time.sleep(0.02)
        status = process.wait(30)
    start.seconds = time.monotonic() - begin_s
    start.status = None if "hung" in start.notes else status
    start.stderr = log.read_text(encoding="utf-8", errors="replace")
    if start.resumed is None:
        start.resumed = _read_resumed(log)
        if start.resumed is not None:
            on_resume(start.resumed)
    if fault is not None and Path(fault.fired).exists():
        start.fault = fault.kind
        start.killed = fault.victim if fault.kills else None
        step = Path(fault.fired).read_text()
        start.saving = int(step) if step else None
    return start


def _make_fault(plan: Plan, case: Case, fired: Path) -> Fault:
    num_writers = plan.nproc if case.mode == "sharded" else 1
    if plan.fault == "kill before an operation":
        place = 1 + int(plan.place * SAVE_OPERATIONS)
    elif plan.fault == "kill in the copy":
        place = 1 + int(plan.place * COPIED_TENSORS / num_writers)
    elif plan.fault in ("remove a file", "kill in retention"):
        place = 1 + int(plan.place * SAVE_FILES)
    else:
        place = int(plan.place * SAVE_BYTES / num_writers)
    return Fault(plan.fault, plan.save, place, plan.victim, str(fired))


def strike(victim: str, launcher_pid: int, mark: str, tmp: Path) -> str | None:
    """Kill one process of that role; the role, or `None` where nobody has it at this instant."""
    marked = find_marked(mark)
    if victim == "everything":
        return victim if kill(process.pid for process in marked) else None
    pids = sort_by_role(marked, launcher_pid, tmp).get(victim, [])
    return victim if kill(pids[-1:]) else None


def _read_resumed(log: Path) -> int | None:
    text = log.read_text(encoding="utf-8", errors="replace")
    if found := _RESUMING.search(text):
        return int(found[1])
    return 0 if _BEGINNING.search(text) and "steps" in text else None


def _changed(path: Path) -> tuple[int, int]:
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)
