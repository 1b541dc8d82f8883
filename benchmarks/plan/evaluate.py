"""Fits the constants of the model of time, and measures its error on publications that were left out.

    python benchmarks/plan/evaluate.py [ROWS.csv] [--write]     # --write: fitted.json, residuals.csv
    python benchmarks/plan/evaluate.py --no-fit                 # predicts with the shipped constants alone

Constants are found by a search along each of them, between bounds. Every row of a publication is predicted by
constants that were fitted without it. A row of N in its publication counts 1/N in the fit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

from published import ROWS, Run, read_runs
from quantiles import find_quantiles, write_residuals

from paceline.plan.demand import Demands
from paceline.plan.fit import Constants
from paceline.plan.search import find_limit
from paceline.plan.step import StepModel

TARGET = Path(__file__).parents[2] / "src" / "paceline" / "plan" / "fitted.json"
GIB = 1 << 30
# Physics: no share above 1, a half-filled product at some hundreds, a link's step of microseconds.
BOUNDS = {
    "product": (0.5, 1.0), "half_inner": (20, 1000), "narrow": (0.4, 1.0), "attention": (0.2, 0.95),
    "moved": (0.2, 0.95),
    "inside": (0.5, 0.9), "between": (0.3, 0.95), "contention": (0.0, 0.6), "straggle": (0.0, 0.03),
    "call_s": (1e-6, 15e-6), "between_s": (2e-6, 30e-6), "inside_s": (0.5e-6, 10e-6),
}  # fmt: skip


def predict(runs: list[Run], fit: Constants) -> list[float]:
    """Return log(predicted / measured) of each run."""
    return [
        math.log(StepModel(run.costs, run.cluster(fit), fit).time(run.layout).total / run.step_s)
        for run in runs
    ]


def score(runs: list[Run], fit: Constants) -> float:
    """Return a robust mean of the errors, each publication with the weight of the root of its rows."""
    counts = defaultdict(int)
    for run in runs:
        counts[run.source] += 1
    total = weight = 0.0
    for run, error in zip(runs, predict(runs, fit), strict=True):
        w = counts[run.source] ** -0.5
        total += w * (math.sqrt(error**2 + 0.05**2) - 0.05)
        weight += w
    return total / weight


def fit_constants(runs: list[Run], start: Constants, rounds: int = 3) -> Constants:
    """Return the constants with the least score, by a search along one after the other."""
    best, least, reach = start, score(runs, start), 0.25
    for _ in range(rounds):
        for name, (low, high) in BOUNDS.items():
            for sign in (1, -1):
                while True:
                    value = getattr(best, name)
                    moved = min(high, max(low, value * (1 + sign * reach) if value else sign * reach * 0.1))
                    tried = replace(best, **{name: moved})
                    if moved == value or (found := score(runs, tried)) >= least - 1e-6:
                        break
                    best, least = tried, found
        reach /= 2
    return best


def describe(errors: list[float]) -> tuple[float, float, float]:
    """Return median and 90th percentile of |predicted / measured - 1|, and the median of the ratio."""
    sizes = sorted(abs(math.exp(error) - 1) for error in errors)
    return (
        statistics.median(sizes),
        sizes[int(0.9 * (len(sizes) - 1) + 0.5)],
        math.exp(statistics.median(errors)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--no-fit", action="store_true", help="predict with the shipped constants alone")
    parser.add_argument("--worst", type=int, default=0)
    args = parser.parse_args()
    runs, left = [], defaultdict(int)
    for _, run in read_runs(args.rows):
        if isinstance(run, Run):
            runs.append(run)
        else:
            left[run] += 1
    everything, runs = runs, [run for run in runs if run.step_s]
    print(f"{len(runs)} rows; left out: " + ", ".join(f"{n} ({why})" for why, n in left.items()))
    start = Constants()
    if args.no_fit:
        from paceline.plan.fit import load_constants

        whole = load_constants()
        errors = dict(zip(map(id, runs), predict(runs, whole), strict=True))
    else:
        whole = fit_constants(runs, start)
        errors = {}
        for name in sorted({run.publication for run in runs}):
            rest = [run for run in runs if run.publication != name]
            held = [run for run in runs if run.publication == name]
            fit = fit_constants(rest, whole, rounds=2)
            errors |= dict(zip(map(id, held), predict(held, fit), strict=True))
    print("constants:", {key: float(f"{value:.3g}") for key, value in asdict(whole).items()})
    report(runs, errors)
    report_sweeps(runs, errors)
    print("\npredicted over measured, rows\n" + "\n".join(draw(list(errors.values()))))
    peaks = [run for run in everything if run.peak_gb is not None]
    memory = report_memory(peaks)
    report_fits(everything, memory)
    if args.worst:
        for run in sorted(runs, key=lambda run: -abs(errors[id(run)]))[: args.worst]:
            print(
                f"{math.exp(errors[id(run)]):.2f} {run.step_s:.3g}s {run.source} | {run.layout} | {run.words}"
            )
    if args.write:
        write(runs, errors, whole, memory)
        write_residuals("step", ((run.publication, errors[id(run)]) for run in runs))
        write_residuals("memory", ((run.publication, -find_excess(run)) for run in peaks))


def report(runs: list[Run], errors: dict[int, float]) -> None:
    """Print the table per publication."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.source].append(run)
    print(
        f"\n{'publication':<52}{'rows':>5}{'median':>8}{'p90':>7}{'ratio':>7}{'80% bar':>9}{'one point':>11}"
    )
    covered, pointed = [], []
    for source, own in sorted(groups.items()):
        held = [errors[id(run)] for run in own]
        others = [run for run in runs if run.publication != own[0].publication]
        low, high = find_quantiles([errors[id(run)] for run in others], [run.source for run in others], 0.8)
        # The true time is the predicted one times exp(-error).
        inside = [low <= error <= high for error in held]
        covered += inside
        points = [other - held[k] for k in range(len(held)) for j, other in enumerate(held) if j != k]
        pointed += points
        median, p90, ratio = describe(held)
        point = f"{describe(points)[0]:.1%}" if points else "-"
        print(
            f"{source[:51]:<52}{len(own):>5}{median:>8.1%}{p90:>7.0%}{ratio:>7.2f}"
            f"{statistics.mean(inside):>9.0%}{point:>11}"
        )
    median, p90, ratio = describe(list(errors.values()))
    print(
        f"{'all':<52}{len(runs):>5}{median:>8.1%}{p90:>7.0%}{ratio:>7.2f}"
        f"{statistics.mean(covered):>9.0%}{describe(pointed)[0]:>11.1%}"
    )
    by_source = [describe([errors[id(run)] for run in own])[0] for own in groups.values()]
    print(f"median over publications of their medians: {statistics.median(by_source):.1%}")


def report_sweeps(runs: list[Run], errors: dict[int, float]) -> None:
    """Print how much slower than the best the layout is that is predicted to be fastest, by published sweep.

    A sweep is one model, batch and cluster of a publication under several layouts.
    """
    sweeps = defaultdict(list)
    for run in runs:
        key = (run.publication, run.words, run.costs.global_batch, run.costs.tokens, run.costs.num_parameters)
        sweeps[key].append(run)
    over = []
    print(f"\n{'published sweep':<70}{'layouts':>8}{'pick':>7}")
    for (name, words, batch, *_), own in sweeps.items():
        if len({(run.layout, run.costs.microbatch) for run in own}) < 2:
            continue
        pick = min(own, key=lambda run: run.step_s * math.exp(errors[id(run)]))
        over.append(pick.step_s / min(run.step_s for run in own) - 1)
        print(f"{f'{name}, {words}, batch {batch}'[:69]:<70}{len(own):>8}{over[-1]:>+7.0%}")
    near = sum(each <= 0.05 for each in over)
    print(f"the pick is within 5% of the best in {near} of {len(over)} sweeps, at worst {max(over):.0%} off")


def report_memory(runs: list[Run]) -> dict[str, list[float]]:
    """Print the published peaks beside the counted ones, of which nothing is fitted; return the quantiles.

    `80% bar` is the share inside of an interval around the count that the other publications give.
    """
    rows = [(run, find_excess(run)) for run in runs]
    groups = defaultdict(list)
    for run, error in rows:
        others = [(other, each) for other, each in rows if other.publication != run.publication]
        low, high = find_quantiles([each for _, each in others], [other.source for other, _ in others], 0.8)
        groups[run.source].append((-error, low <= error <= high))
    title = "peak memory (GiB), nothing fitted"
    print(f"\n{title:<52}{'rows':>5}{'median':>8}{'p90':>7}{'ratio':>7}{'80% bar':>9}")
    every = [row for own in groups.values() for row in own]
    for source, own in [*sorted(groups.items()), ("all", every)]:
        median, p90, ratio = describe([row[0] for row in own])
        held = statistics.mean(row[1] for row in own)
        print(f"{source[:51]:<52}{len(own):>5}{median:>8.1%}{p90:>7.0%}{ratio:>7.2f}{held:>9.0%}")
    errors, names = [error for _, error in rows], [run.source for run, _ in rows]
    return {
        f"{level:g}": [round(x, 4) for x in find_quantiles(errors, names, level)] for level in (0.5, 0.8, 0.9)
    }


def find_excess(run: Run) -> float:
    """Return the logarithm of a published peak over the counted one."""
    assert run.peak_gb is not None
    demand = Demands(run.costs, run.cluster(Constants())).count(run.layout)
    return math.log(run.peak_gb * GIB / demand.total)


def report_fits(runs: list[Run], memory: dict[str, list[float]]) -> None:
    """Print how many of the published runs, all of which fitted, a plan would say to fit."""
    counts = defaultdict(int)
    for run in runs:
        cluster = run.cluster(Constants())
        total, room = Demands(run.costs, cluster).count(run.layout).total, find_limit(cluster)
        for name, end in (("count", 0.0), ("upper end", memory["0.8"][1])):
            counts[name] += total * math.exp(end) <= room
    print(f"\nof {len(runs)} runs that fitted, the count fits in {counts['count']}, ", end="")
    print(f"the upper end of the 80% bar in {counts['upper end']}")


def draw(logs: list[float]) -> list[str]:
    """Return a histogram of logarithms of ratios, four rows per doubling."""
    places = [math.floor(4 * each / math.log(2)) for each in logs]
    most = max(map(places.count, places))
    return [
        f"{2 ** (p / 4):>6.2f} to {2 ** ((p + 1) / 4):<6.2f}{places.count(p):>4} "
        + "#" * round(50 * places.count(p) / most)
        for p in range(min(places), max(places) + 1)
    ]


def write(runs: list[Run], errors: dict[int, float], fit: Constants, memory: dict[str, list[float]]) -> None:
    """Write the data file of the package."""
    # Ends of measured over predicted.
    residuals = [-errors[id(run)] for run in runs]
    names = [run.source for run in runs]
    groups = defaultdict(list)
    for run in runs:
        groups[run.source].append(-errors[id(run)])
    single, single_names = [], []
    random.seed(0)
    for source, own in groups.items():
        for k, point in enumerate(own):
            for j, other in enumerate(own):
                if j != k:
                    single.append(other - point)
                    single_names.append(source)
    hardware = {
        f"{level:g}": [round(x, 4) for x in find_quantiles(residuals, names, level)]
        for level in (0.5, 0.8, 0.9)
    }
    one = {
        f"{level:g}": [round(x, 4) for x in find_quantiles(single, single_names, level)]
        for level in (0.5, 0.8, 0.9)
    }
    table = {
        "made_by": "benchmarks/plan/evaluate.py --write; bars.probed: benchmarks/plan/machine.py --write",
        "constants": {key: float(f"{value:.4g}") for key, value in asdict(fit).items()},
        "bars": {
            **json.loads(TARGET.read_text())["bars"],
            "hardware": hardware,
            "calibrated": one,
            "memory": memory,
        },
        "seen": {
            "processors": sorted({run.gpu for run in runs}),
            "schedules": sorted({run.layout.schedule for run in runs}),
            "axes": ["dp_replicate", "dp_shard", "tp", "pp", "cp"],
            "most_ranks": max(run.layout.num_ranks for run in runs),
        },
        "median_error": round(describe(list(errors.values()))[0], 4),
        "rows": len(runs),
        "publications": len({run.publication for run in runs}),
    }
    TARGET.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
