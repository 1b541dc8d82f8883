"""Tallies whom profiles blame: in trainings with one planted cause of waiting each, and in healthy ones.

    python benchmarks/blame/run.py                      # all; writes results.json and results.txt
    python benchmarks/blame/run.py SlowBlock Jitter     # some, only printed
    python benchmarks/blame/run.py --tables             # the last results

Each case runs on 2 or 4 ranks on this machine and is recorded as `paceline profile` does. A case is right if
the first cause named has the planted rank, phase and line. Its cost is compared with what a step gains
without the cause, measured by running both trainings in turn. Exit code 1 if fewer than 28 are right or a
healthy training is blamed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.memory.steps import StepMemory
from paceline.profiling.analysis import analyse
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.read import read_traces

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cases import CAUSES, HEALTHY, PAUSE_S, Job
from tally import describe_start, find_median_error, run_benchmark, time_steps

HERE = Path(__file__).parent

KINDS = {**CAUSES, **HEALTHY}
NUM_STEPS, NUM_AFTER = 12, 3
# Both trainings run in turn: what two recordings one after the other take differs by the machine's load too.
NUM_ROUNDS, STEPS_PER_ROUND = 8, 6
GAINS = "gains.json"
LEAST_RIGHT = 28
COST_SHARE, COST_S = 0.15, 0.003


def run_cases(names: list[str], folder: str) -> None:
    """Run cases one after the other, as planted and without the cause; called on every rank."""
    with paceline.start(device="cpu") as world:
        for name in names:
            kind = KINDS[name]
            jobs = []
            for way in ("planted", "without") if name in CAUSES else ("planted",):
                is_late = name in CAUSES and way == "planted" and world.rank == kind.late
                jobs.append(kind(world.rank, PAUSE_S if is_late else 0.0))
                record(jobs[-1], world.rank, f"{folder}/{name}/{way}")
            if len(jobs) > 1:
                gains = [measure_gain(*jobs, is_first=bool(number % 2)) for number in range(NUM_ROUNDS)]
                if world.rank == 0:
                    (Path(folder) / name / GAINS).write_text(json.dumps(gains))


def measure_gain(planted: Job, without: Job, *, is_first: bool) -> float:
    """Return how many seconds less a step takes without the cause; both run in turn, on every rank."""
    took = {}
    for job in (planted, without) if is_first else (without, planted):
        took[job] = time_steps(job, STEPS_PER_ROUND)
    return took[planted] - took[without]


def record(job: Job, rank: int, folder: str) -> None:
    steps = StepMemory()
    recorder = StepRecorder(rank, RecordSettings(folder, after=NUM_AFTER, steps=NUM_STEPS), steps)
    recorder.install(torch)
    for _ in range(NUM_AFTER + NUM_STEPS + 2):
        job.step()
    recorder.finish()
    steps.remove()
    dist.barrier()


def judge(name: str, kind: type[Job], folder: Path) -> dict[str, Any]:
    profile = analyse(read_traces([folder / name / "planted"]))
    blames = [
        {
            "rank": blame.rank,
            "phase": blame.phase,
            "function": None if blame.place is None else blame.place.function,
            "module": None if blame.place is None else blame.place.module,
            "cost_s": blame.gain_ns / 1e9,
        }
        for blame in profile.blames
    ]
    found: dict[str, Any] = {"name": name, "ranks": kind.nproc, "blames": blames}
    if name in CAUSES:
        without = analyse(read_traces([folder / name / "without"]))
        gains = json.loads((folder / name / GAINS).read_text())
        found |= {
            "gain_s": median(gains),
            "gain_error_s": find_median_error(gains),
            "expected": [kind.late, list(kind.phases), list(kind.functions), kind.module],
            "without": [[blame.rank, blame.phase] for blame in without.blames],
        }
    return found


def check(found: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
    """Return whether rank, phase, line and cost of a planted cause are right."""
    if not found["blames"]:
        return False, False, False, False
    worst = found["blames"][0]
    rank, phases, functions, module = found["expected"]
    # Causes that spread over phases, such as more samples, cost their sum.
    cost = sum(b["cost_s"] for b in found["blames"] if b["rank"] == rank and b["phase"] in phases)
    is_line = not functions or (worst["function"] in functions and (not module or worst["module"] == module))
    error = abs(cost - found["gain_s"])
    is_cost = error <= max(COST_S, COST_SHARE * found["gain_s"])
    return worst["rank"] == rank, worst["phase"] in phases, is_line, is_cost


def describe(result: dict[str, Any]) -> str:
    planted = [found for found in result["found"] if "expected" in found]
    healthy = [found for found in result["found"] if "expected" not in found]
    checks = {found["name"]: check(found) for found in planted}
    lines = [
        *describe_start(result),
        "| planted cause | ranks | blamed | rank | phase | line | cost named, ms | gain without it, ms "
        "| within 15% or 3 ms |",
        "|---|---:|---|---|---|---|---:|---:|---|",
    ]
    for found in planted:
        right = ["yes" if each else "no" for each in checks[found["name"]]]
        worst = found["blames"][0] if found["blames"] else None
        words = "nobody"
        if worst is not None:
            words = f"rank {worst['rank']}, {worst['phase']}, {worst['function']}"
            words += f" (module {worst['module']})" if worst["module"] else ""
        cost = 1e3 * sum(
            b["cost_s"]
            for b in found["blames"]
            if b["rank"] == found["expected"][0] and b["phase"] in found["expected"][1]
        )
        lines.append(
            f"| {found['name']} | {found['ranks']} | {words} | {right[0]} | {right[1]} | {right[2]} "
            f"| {cost:.1f} | {1e3 * found['gain_s']:.1f} ± {1e3 * found.get('gain_error_s', 0):.1f} "
            f"| {right[3]} |"
        )
    lines += ["", "| healthy | ranks | blamed |", "|---|---:|---|"]
    for found in healthy:
        words = ", ".join(
            f"rank {b['rank']} ({b['phase']}, {1e3 * b['cost_s']:.1f} ms)" for b in found["blames"]
        )
        lines.append(f"| {found['name']} | {found['ranks']} | {words or 'nobody'} |")
    right = sum(all(each[:3]) for each in checks.values())
    costs = sum(each[3] for each in checks.values())
    calm = sum(not found["blames"] for found in healthy)
    lines += [
        "",
        f"rank, phase and line right: {right} of {len(planted)}; cost right: {costs} of {len(planted)}; "
        f"healthy trainings with nobody blamed: {calm} of {len(healthy)}",
        "",
    ]
    return "\n".join(lines)


def passes(result: dict[str, Any]) -> bool:
    planted = [found for found in result["found"] if "expected" in found]
    wrong = sum(not all(check(found)[:3]) for found in planted)
    blamed = any(found["blames"] for found in result["found"] if "expected" not in found)
    return wrong <= len(CAUSES) - LEAST_RIGHT and not blamed


def measure(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for nproc in (2, 4):
            chosen = [name for name in names if KINDS[name].nproc == nproc]
            if chosen:
                paceline.launch(run_cases, nproc=nproc, args=(chosen, folder), device="cpu")
        found = []
        for name in names:
            try:
                found.append(judge(name, KINDS[name], Path(folder)))
            except paceline.PacelineError as error:
                raise SystemExit(f"{name}: {error}") from None
    return found


if __name__ == "__main__":
    sys.exit(run_benchmark(HERE, __doc__, list(KINDS), measure, describe, passes))
