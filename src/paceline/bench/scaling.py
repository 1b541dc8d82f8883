"""Measures throughput on 1, 2, 4 ... ranks of this machine, and the gain of each further rank.

Every number of ranks runs in its own processes, one after the other. The whole round is repeated in
alternating direction, so that a machine that slows down affects all of them. Speed-up and efficiency are
computed within a round; then the median over rounds is taken.

All ranks have the same number of threads, whatever the number of ranks. If one rank had the whole machine
while two have half each, adding ranks would be measured against adding threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from paceline.bench.ranks import NUM_WARM_UP, adapt_recipe, check_counts, choose_threads, open_bench
from paceline.bench.spread import Spread
from paceline.data import prepare_data
from paceline.data.share import owned_microbatches, split_microbatches
from paceline.errors import PacelineError
from paceline.launching.local import check_launch, launch
from paceline.place import usable_cores
from paceline.recipe import Recipe


@dataclass(frozen=True)
class ScalingPoint:
    """The measurement of one number of ranks.

    Attributes:
        num_ranks: how many.
        global_batch_size: samples per step over all ranks.
        samples_per_s: throughput, over repeats.
        tokens_per_s: the same in tokens, for text.
        speedup: throughput over that of the fewest ranks in the same repeat.
        efficiency: speed-up over the factor of ranks.
        best_efficiency: what it would be without any cost of communication. Below 1 where microbatches
            cannot be shared out evenly: ranks then wait for the one with most.
        step_s: median seconds per step.
        comm_share: share of the step time that ranks wait for others and for the wire (0 on CUDA).
    """

    num_ranks: int
    global_batch_size: int
    samples_per_s: Spread
    tokens_per_s: Spread | None
    speedup: Spread
    efficiency: Spread
    best_efficiency: float
    step_s: float
    comm_share: float


@dataclass(frozen=True)
class Scaling:
    """The result of `measure_scaling`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        points: one per number of ranks, fewest first.
        weak: whether the global batch grew with the ranks (weak scaling) or was shared out (strong).
        microbatch_size: samples per forward.
        num_parameters: of the model.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same for all.
        num_cores: that this process may use.
        num_steps: measured per repeat, after `num_warm_up`.
        num_warm_up: steps left out.
        num_repeats: rounds over all numbers of ranks.
    """

    points: list[ScalingPoint]
    weak: bool
    microbatch_size: int
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
    recipe: Recipe,
    ranks: Sequence[int],
    *,
    steps: int = 20,
    repeats: int = 3,
    weak: bool = False,
) -> Scaling:
    """Train a recipe for a few steps on each number of ranks and compare the throughput.

    Call it in a process that is not a rank itself: it starts ranks of its own. Takes about a second per
    launch, with `repeats` launches for every number of ranks, and a few more seconds for the first one.

    Args:
        recipe: what to train. Its layout, length and checkpoints play no part.
        ranks: numbers of ranks; speed-up is against the fewest.
        steps: measured steps of each launch.
        repeats: launches of each number of ranks.
        weak: let the global batch grow with the number of ranks (times `num_ranks`), instead of sharing
            out the same one.

    Raises:
        PacelineError: PL620 for numbers below 1, PL621 where some numbers of ranks would run on CUDA and
            others on the CPU, PL320 to PL326 for ranks that cannot be started.
    """
    check_counts(steps=steps, repeats=repeats, **{f"ranks[{i}]": n for i, n in enumerate(ranks)})
    ranks = sorted(set(ranks))
    check_launch(ranks[-1], recipe.train.device)
    prepare_data(recipe)
    threads = choose_threads(recipe, ranks[-1])
    runs: dict[int, list[_ScalingRun]] = {num_ranks: [] for num_ranks in ranks}
    for number in range(repeats):
        for num_ranks in ranks if number % 2 == 0 else reversed(ranks):
            adapted = adapt_recipe(
                recipe, threads=threads, num_steps=NUM_WARM_UP + steps, grow=num_ranks if weak else 1
            )
            found: list[_ScalingRun] = launch(
                _run, num_ranks, (adapted, steps), device=recipe.train.device, hang_after_s=None
            )
            runs[num_ranks].append(_join(found))
    _check_one_device(runs)
    first = runs[ranks[0]]
    return Scaling(
        points=[_summarise(n, runs[n], ranks[0], first, recipe, weak=weak) for n in ranks],
        weak=weak,
        microbatch_size=recipe.train.microbatch_size,
        num_parameters=first[0].num_parameters,
        device=first[0].device,
        threads_per_rank=threads,
        num_cores=usable_cores(),
        num_steps=steps,
        num_warm_up=NUM_WARM_UP,
        num_repeats=repeats,
    )


@dataclass(frozen=True)
class _ScalingRun:
    """The measurement of one launch, by one rank (or by all of them together)."""

    samples_per_s: float
    tokens_per_sample: int | None
    step_s: float
    comm_share: float
    device: str
    num_parameters: int


def _run(recipe: Recipe, steps: int) -> _ScalingRun:
    with open_bench(recipe) as bench:
        for _ in range(NUM_WARM_UP):
            bench.trainer.step(next(bench.shares))
        bench.synchronise()
        start_s = time.perf_counter()
        taken = [bench.trainer.step(next(bench.shares)) for _ in range(steps)]
        bench.world.wait_for_device()
        total_s = time.perf_counter() - start_s
        return _ScalingRun(
            samples_per_s=sum(step.num_samples for step in taken) / total_s,
            tokens_per_sample=bench.tokens_per_sample,
            step_s=total_s / steps,
            comm_share=sum(step.comm_s for step in taken) / total_s,
            device=bench.world.device.type,
            num_parameters=bench.num_parameters,
        )


def _join(found: list[_ScalingRun]) -> _ScalingRun:
    """Return rank 0's times with the mean share of waiting: a rank waits while another is late."""
    values: dict[str, Any] = {**vars(found[0]), "comm_share": fmean(run.comm_share for run in found)}
    return _ScalingRun(**values)


def _check_one_device(runs: dict[int, list[_ScalingRun]]) -> None:
    devices = {num_ranks: found[0].device for num_ranks, found in runs.items()}
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"{n} ranks on {device}" for n, device in devices.items())
        raise PacelineError(
            "PL621",
            saw=f"{shown}.",
            rule="Scaling compares like with like, and device='auto' uses CUDA only if every rank has a "
            "device.",
            fix='Use fewer ranks, or --set train.device="cpu".',
        )


def _summarise(
    num_ranks: int,
    runs: list[_ScalingRun],
    fewest: int,
    first: list[_ScalingRun],
    recipe: Recipe,
    *,
    weak: bool,
) -> ScalingPoint:
    tokens = runs[0].tokens_per_sample
    speedups = [run.samples_per_s / base.samples_per_s for run, base in zip(runs, first, strict=True)]
    size = recipe.train.global_batch_size * (num_ranks if weak else 1)
    base_size = recipe.train.global_batch_size * (fewest if weak else 1)
    micro = recipe.train.microbatch_size
    # Samples per unit of compute: the step takes as long as the rank with most samples.
    best = size / _most_samples(size, micro, num_ranks)
    base_best = base_size / _most_samples(base_size, micro, fewest)
    return ScalingPoint(
        num_ranks=num_ranks,
        global_batch_size=size,
        samples_per_s=Spread.of(run.samples_per_s for run in runs),
        tokens_per_s=None if tokens is None else Spread.of(run.samples_per_s * tokens for run in runs),
        speedup=Spread.of(speedups),
        efficiency=Spread.of(speedup * fewest / num_ranks for speedup in speedups),
        best_efficiency=best / base_best * fewest / num_ranks,
        step_s=median(run.step_s for run in runs),
        comm_share=median(run.comm_share for run in runs),
    )


def _most_samples(global_batch_size: int, microbatch_size: int, num_ranks: int) -> int:
    """Return the number of samples of the rank with the most."""
    blocks = split_microbatches(global_batch_size, microbatch_size)
    own = (owned_microbatches(len(blocks), num_ranks, rank) for rank in range(num_ranks))
    return max(sum(blocks[number][1] - blocks[number][0] for number in numbers) for numbers in own)
