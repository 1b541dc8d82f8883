"""Measures throughput on 1, 2, 4 ... ranks of this machine, and the gain of each further rank.

Every number of ranks runs in its own processes, one after the other. The whole round is repeated in
alternating direction, so that a machine that slows down affects all of them. Speed-up and efficiency are
computed within a round; then the median over rounds is taken.

All ranks have the same number of threads, whatever the number of ranks. If one rank had the whole machine
while two have half each, adding ranks would be measured against adding threads.

After the last timed step, some steps are recorded as by `paceline profile`. The parts of a step that grow
from the fewest to the most ranks, per sample, say why the efficiency is what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from paceline.bench.rank.timing import TimeSettings
from paceline.bench.spread import Spread
from paceline.bench.starts import NUM_WARM_UP, Measured, Run, check_counts
from paceline.errors import PacelineError
from paceline.launching.local import check_launch
from paceline.place import usable_cores
from paceline.profiling.analysis import Profile
from paceline.profiling.rank_trace import DATA

GOOD_EFFICIENCY = 0.8
"""Of N ranks, for models of at least some ten million parameters."""
_RECORDED_STEPS = 10
WIRE, WAITING, COMPUTING, LOADING, ELSE = "wire", "waiting", "computing", "loading", "else"
"""The parts of a step: communication that no computation hides, without waiting for late ranks; waiting for
them; computation; the loader; everything else."""


@dataclass(frozen=True)
class ScalingPoint:
    """The measurement of one number of ranks.

    Attributes:
        num_ranks: how many.
        samples_per_step: over all ranks; 0 if they are not known, and rates then count steps of ranks.
        samples_per_s: throughput, over repeats.
        speedup: throughput over that of the fewest ranks in the same repeat.
        efficiency: speed-up over the factor of ranks.
        step_s: median seconds per step.
        parts_s: of a recorded step, by the names above; empty if nothing was recorded.
        comm_bytes: of collectives that a rank issues in a step.
        num_calls: of such collectives.
    """

    num_ranks: int
    samples_per_step: float
    samples_per_s: Spread
    speedup: Spread
    efficiency: Spread
    step_s: float
    parts_s: dict[str, float]
    comm_bytes: int
    num_calls: int


@dataclass(frozen=True)
class Scaling:
    """The result of `measure_scaling`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        points: one per number of ranks, fewest first.
        is_weak: whether the samples of a step grow with the ranks, or are shared out.
        num_parameters: of the model; 0 if there is no DDP module.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same for all.
        num_cores: that this process may use.
        num_steps: measured per repeat, after `num_warm_up`.
        num_warm_up: steps left out.
        num_repeats: rounds over all numbers of ranks.
    """

    points: list[ScalingPoint]
    is_weak: bool
    num_parameters: int
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int
    num_warm_up: int
    num_repeats: int


def list_ranks(most: int) -> list[int]:
    """Return 1, 2, 4 ... and `most` itself."""
    check_counts(nproc=most)
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return sorted({*powers, most})


def measure_scaling(
    job: Measured, ranks: Sequence[int], *, steps: int = 20, repeats: int = 3, weak: bool = False
) -> Scaling:
    """Run a script or a recipe for a few steps on each number of ranks and compare the throughput.

    Args:
        job: what to run.
        ranks: numbers of ranks; speed-up is against the fewest.
        steps: measured steps of each start.
        repeats: starts of each number of ranks.
        weak: let a recipe's global batch grow with the number of ranks, instead of sharing out the same one.
    """
    check_counts(steps=steps, repeats=repeats, **{f"ranks[{i}]": n for i, n in enumerate(ranks)})
    ranks = sorted(set(ranks))
    check_launch(ranks[-1])
    threads = job.choose_threads(ranks[-1])
    settings = TimeSettings(NUM_WARM_UP, steps, 1, record_steps=_RECORDED_STEPS)
    runs: dict[int, list[Run]] = {num_ranks: [] for num_ranks in ranks}
    for number in range(repeats):
        for num_ranks in ranks if number % 2 == 0 else reversed(ranks):
            # The reasons are taken from one round.
            each = replace(settings, record_steps=settings.record_steps if number == 0 else 0)
            runs[num_ranks].append(job.run(num_ranks, threads, each, grow=num_ranks if weak else 1))
    _check_one_device(runs)
    first = runs[ranks[0]]
    points = [summarise(n, runs[n], ranks[0], first) for n in ranks]
    return Scaling(
        points=points,
        is_weak=points[-1].samples_per_step > 1.5 * points[0].samples_per_step or not first[0].samples,
        num_parameters=first[0].ranks[0].num_parameters,
        device=first[0].ranks[0].device,
        threads_per_rank=threads,
        num_cores=usable_cores(),
        num_steps=steps,
        num_warm_up=NUM_WARM_UP,
        num_repeats=repeats,
    )


def summarise(num_ranks: int, runs: list[Run], fewest: int, first: list[Run]) -> ScalingPoint:
    """Return the measurement of one number of ranks, against the fewest ones in the same round."""
    rates, bases = (
        [(run.samples or len(run.ranks)) / run.step_s()[0] for run in each] for each in (runs, first)
    )
    speedups = [rate / base for rate, base in zip(rates, bases, strict=True)]
    profile = next((run.profile for run in runs if run.profile is not None), None)
    parts, num_bytes, num_calls = ({}, 0, 0) if profile is None else divide_step(profile)
    return ScalingPoint(
        num_ranks=num_ranks,
        samples_per_step=median(run.samples for run in runs),
        samples_per_s=Spread.of(rates),
        speedup=Spread.of(speedups),
        efficiency=Spread.of(speedup * fewest / num_ranks for speedup in speedups),
        step_s=median(run.step_s()[0] for run in runs),
        parts_s=parts,
        comm_bytes=num_bytes,
        num_calls=num_calls,
    )


def divide_step(profile: Profile) -> tuple[dict[str, float], int, int]:
    """Return the seconds of a step by part, mean over ranks, and the bytes and number of its collectives."""
    rows = profile.rows
    waiting = fmean(sum(row.waiting_ns.values()) for row in rows) / 1e9
    exposed = fmean(row.exposed_ns for row in rows) / 1e9
    parts = {
        WIRE: max(0.0, exposed - waiting),
        WAITING: waiting,
        COMPUTING: fmean(row.compute_ns for row in rows) / 1e9,
        LOADING: fmean(row.phases.get(DATA, 0) for row in rows) / 1e9,
    }
    parts[ELSE] = max(0.0, fmean(row.total_ns for row in rows) / 1e9 - sum(parts.values()))
    traffic = [sum(each.num_bytes or 0 for each in row.traffic) for row in rows]
    return parts, round(fmean(traffic)), round(fmean(sum(each.count for each in row.traffic) for row in rows))


def find_excess(first: ScalingPoint, last: ScalingPoint) -> dict[str, float]:
    """Return the seconds by which each part of a step is longer on the most ranks, for the same samples."""
    if not first.parts_s or not last.parts_s:
        return {}
    factor = 1.0
    if first.samples_per_step and last.samples_per_step:
        own = last.samples_per_step / last.num_ranks
        factor = own / (first.samples_per_step / first.num_ranks)
    return {name: last.parts_s[name] - factor * first.parts_s[name] for name in last.parts_s}


def _check_one_device(runs: dict[int, list[Run]]) -> None:
    devices = {num_ranks: found[0].ranks[0].device for num_ranks, found in runs.items()}
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"{n} ranks on {device}" for n, device in devices.items())
        raise PacelineError(
            "PL621",
            saw=f"{shown}.",
            rule="Scaling compares like with like, and device='auto' uses CUDA only if every rank has a "
            "device.",
            fix='Use fewer ranks, or --set train.device="cpu".',
        )
