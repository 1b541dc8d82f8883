"""Compares recorded phases with those of torch.profiler and of the script's own clock, and applies advice.

    python benchmarks/phases/run.py                  # all; writes results.json and results.txt
    python benchmarks/phases/run.py Plain Sharded    # some, only printed
    python benchmarks/phases/run.py --tables         # the last results

Each script runs on 2 ranks. Recordings of Paceline and of torch.profiler take turns. A phase is right if each
of both is within 10% or 1 ms of the clock's median. Where a profile advises a setting, the script with and
without it run in turn. Exit code 1 if a phase is wrong, an advice gains nothing, or PL917 more than it says.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import paceline
from paceline.memory.steps import StepMemory
from paceline.profiling.analysis import analyse
from paceline.profiling.judge import judge_profile
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.read import read_traces

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from scripts import ADVICE, SCRIPTS, Plain, advised, iterate_marks
from tally import describe_start, find_median_error, run_benchmark, time_steps

HERE = Path(__file__).parent
WAYS = ("light", "torch")
NUM_ROUNDS, NUM_STEPS, NUM_BEFORE = 3, 8, 3
GAIN_ROUNDS, GAIN_STEPS = 10, 15
SHARE, LEAST_S = 0.1, 0.001


def record_scripts(names: list[str], folder: str) -> dict[str, Any]:
    """Record each script in both ways in turn; return what its clock measured, by script and way."""
    found: dict[str, Any] = {}
    gc.disable()  # only recordings of Paceline list collections apart
    with paceline.start(device="cpu") as world:
        for name in names:
            script = SCRIPTS[name](world.rank)
            steps = iterate_marks(script)
            list(islice(steps, NUM_BEFORE))
            clock: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(NUM_ROUNDS):
                clock["light"] += record_light(steps, world.rank, f"{folder}/{name}/light/{number}")
                clock["torch"] += record_torch(steps, world.rank, f"{folder}/{name}/torch/{number}")
            found[name] = clock
    return found


def record_light(steps: Any, rank: int, folder: str) -> list[dict[str, float]]:
    memory = StepMemory()
    recorder = StepRecorder(rank, RecordSettings(folder, after=1, steps=NUM_STEPS), memory)
    recorder.install(torch)
    marks = list(islice(steps, NUM_STEPS + 3))
    recorder.finish()
    memory.remove()
    return marks[2:-1]


def record_torch(steps: Any, rank: int, folder: str) -> list[dict[str, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        marks = list(islice(steps, NUM_STEPS + 1))
    Path(folder).mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{folder}/rank-{rank}.json")
    return marks[1:]


def measure_gains(pairs: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    """Return for each script, by round, the seconds of its step and of the advised one's; in turn."""
    found = []
    with paceline.start(device="cpu") as world:
        for name, settings in pairs:
            kind = SCRIPTS[name]
            both = [Timed(kind(world.rank)), Timed(advised(kind, settings)(world.rank))]
            for job in both:  # workers start, and DDP builds its buckets
                time_steps(job, 3)
            rounds = []
            for number in range(GAIN_ROUNDS):
                order = both if number % 2 else both[::-1]
                took = {id(job): time_steps(job, GAIN_STEPS) for job in order}
                rounds.append([took[id(job)] for job in both])
            found.append(rounds)
    return found


class Timed:
    """A script as `time_steps` takes it."""

    def __init__(self, script: Plain) -> None:
        self._steps = iterate_marks(script)

    def step(self) -> None:
        next(self._steps)


def summarize(name: str, folder: Path, clocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each phase, in seconds, by rank, way and source, and the findings."""
    phases: list[dict[str, Any]] = []
    findings: dict[str, tuple[str, float]] = {}
    for rank, clock in enumerate(clocks):
        own: dict[str, Any] = {"rank": rank}
        for way in WAYS:
            profiles = [
                analyse(read_traces([folder / name / way / str(number)])) for number in range(NUM_ROUNDS)
            ]
            # torch.profiler's first step begins with the recording.
            rows = [row for each in profiles for row in each.rows if row.rank == rank and row.step != 1]
            names = sorted({phase for marks in clock[way] for phase in marks})
            own[way] = {
                phase: [
                    median(row.phases.get(phase, 0) / 1e9 for row in rows),
                    median(marks.get(phase, 0.0) for marks in clock[way]),
                ]
                for phase in names
            }
            if way == "light":
                for profile in profiles:
                    for finding in judge_profile(profile):
                        most = promise(finding.code, profile)
                        findings[finding.code] = (
                            finding.fix,
                            max(most, findings.get(finding.code, ("", 0))[1]),
                        )
        phases.append(own)
    return {"name": name, "phases": phases, "findings": findings}


def promise(code: str, profile: Any) -> float:
    """Return the seconds of a step that a finding names."""
    if code == "PL917":
        return max(row.phases.get("data", 0) for row in profile.rows) / 1e9
    if code == "PL918":
        return float(profile.needless.exposed_ns / 1e9)
    return float(profile.mean_step_ns / 1e9)


def is_close(found: float, expected: float) -> bool:
    return abs(found - expected) <= max(LEAST_S, SHARE * max(found, expected))


def list_wrong(found: dict[str, Any]) -> list[str]:
    return [
        f"rank {own['rank']}, {phase}, {way}"
        for own in found["phases"]
        for way in WAYS
        for phase, pair in own[way].items()
        if not is_close(*pair)
    ]


def describe(result: dict[str, Any]) -> str:
    lines = [
        *describe_start(result),
        "ms per step (median): as the report has it / by the script's own clock in the same steps",
        "",
        "| script | rank | recorded by | data | forward | backward | optimizer | host | agree |",
        "|---|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for found in result["found"]:
        wrong = list_wrong(found)
        for own in found["phases"]:
            for way, words in (("light", "Paceline"), ("torch", "torch.profiler")):
                cells = [
                    " / ".join(f"{1e3 * each:.1f}" for each in own[way].get(phase, (0.0, 0.0)))
                    for phase in ("data", "forward", "backward", "optimizer", "host")
                ]
                bad = [
                    each for each in wrong if each.startswith(f"rank {own['rank']}") and each.endswith(way)
                ]
                lines.append(
                    f"| {found['name']} | {own['rank']} | {words} | {' | '.join(cells)} "
                    f"| {'no' if bad else 'yes'} |"
                )
    lines += ["", "| script | advice | it names, ms | gained, ms |", "|---|---|---:|---:|"]
    for found in result["found"]:
        for gain in found["gains"]:
            lines.append(
                f"| {found['name']} | {gain['code']}: {gain['settings']} | {1e3 * gain['most_s']:.1f} "
                f"| {1e3 * gain['gain_s']:.1f} ± {1e3 * gain['error_s']:.1f} |"
            )
    num_wrong = sum(len(list_wrong(found)) for found in result["found"])
    num = sum(len(own[way]) for found in result["found"] for own in found["phases"] for way in WAYS)
    lines += ["", f"phases within 10% or 1 ms of the clock: {num - num_wrong} of {num}", ""]
    return "\n".join(lines)


def passes(result: dict[str, Any]) -> bool:
    gains = [gain for found in result["found"] for gain in found["gains"]]
    return not any(list_wrong(found) for found in result["found"]) and all(
        gain["error_s"] < gain["gain_s"]
        and (gain["code"] != "PL917" or gain["gain_s"] <= gain["most_s"] + gain["error_s"])
        for gain in gains
    )


def measure(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        clocks = paceline.launch(record_scripts, nproc=2, args=(names, folder), device="cpu")
        found = [summarize(name, Path(folder), [own[name] for own in clocks]) for name in names]
    pairs, gains = [], []
    for each in found:
        each["gains"] = []
        for code, (fix, most_s) in each["findings"].items():
            if (each["name"], code) not in ADVICE:
                continue
            settings, samples = ADVICE[each["name"], code]
            if workers := re.search(r"num_workers=(\d+)", fix):
                settings = {"workers": int(workers[1])}
            pairs.append((each["name"], settings))
            gains.append({"code": code, "settings": settings, "samples": samples, "most_s": most_s})
            each["gains"].append(gains[-1])
    if pairs:
        for gain, rounds in zip(
            gains, paceline.launch(measure_gains, nproc=2, args=(pairs,), device="cpu")[0], strict=True
        ):
            differences = [before - after / gain["samples"] for before, after in rounds]
            gain |= {"gain_s": median(differences), "error_s": find_median_error(differences)}
    return found


if __name__ == "__main__":
    sys.exit(run_benchmark(HERE, __doc__, list(SCRIPTS), measure, describe, passes))
