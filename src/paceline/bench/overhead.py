"""Measures the share of the step time that communication takes: whole steps against compute alone.

Both kinds run in the same processes, in alternating blocks (A B, B A, A B ...), so that a machine that slows
down affects both. A block of compute alone takes the same steps on this rank's share of the same kind of
batches. It has the same forwards, backwards, clipping and optimizer, but no all-reduces of gradients and no
agreement. The difference within a pair of blocks is the cost of communication, without what overlaps with
compute.

Compute alone counts as long as on the slowest rank: waiting for a rank with more microbatches is not a cost
of communication.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

from paceline.bench.ranks import NUM_WARM_UP, Bench, adapt_recipe, check_counts, choose_threads, open_bench
from paceline.bench.spread import Spread
from paceline.data import prepare_data
from paceline.errors import PacelineError
from paceline.launching.local import check_launch, launch
from paceline.place import usable_cores
from paceline.recipe import Recipe


@dataclass(frozen=True)
class Overhead:
    """The result of `measure_overhead`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        num_ranks: how many.
        total_s: seconds per whole step, over blocks.
        compute_s: seconds per step of compute alone, on the slowest rank, over blocks.
        comm_share: share of the whole step that compute alone does without, over pairs of blocks. On a noisy
            machine a pair may come out below 0.
        exposed_share: share of the whole step that ranks wait for others and for the wire by the trainer's
            own clock (`comm_s` in the metrics), mean over ranks; 0 on CUDA, where the host does not wait.
        imbalance: share of the compute time that the average rank has less to compute than the slowest.
        num_parameters: of the model.
        gradient_bytes: all-reduced per step.
        global_batch_size: samples per step over all ranks.
        microbatch_size: samples per forward.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same on all.
        num_cores: that this process may use.
        num_steps: in a block.
        num_repeats: pairs of blocks.
    """

    num_ranks: int
    total_s: Spread
    compute_s: Spread
    comm_share: Spread
    exposed_share: float
    imbalance: float
    num_parameters: int
    gradient_bytes: int
    global_batch_size: int
    microbatch_size: int
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int
    num_repeats: int


def measure_overhead(recipe: Recipe, num_ranks: int, *, steps: int = 5, repeats: int = 10) -> Overhead:
    """Time whole steps against compute alone, alternating in one run.

    Call it in a process that is not a rank itself: it starts ranks of its own.

    Args:
        recipe: what to train. Its layout, length and checkpoints play no part.
        num_ranks: how many, 2 or more.
        steps: in a block.
        repeats: pairs of blocks.

    Raises:
        PacelineError: PL620 for numbers below 1, PL622 for one rank, PL320 to PL326 for ranks that cannot be
            started.
    """
    check_counts(steps=steps, repeats=repeats, nproc=num_ranks)
    if num_ranks == 1:
        raise PacelineError(
            "PL622",
            saw="nproc=1.",
            rule="One rank does not communicate.",
            fix="Use two ranks or more: --nproc 2.",
        )
    check_launch(num_ranks, recipe.train.device)
    prepare_data(recipe)
    threads = choose_threads(recipe, num_ranks)
    num_steps = 2 * (NUM_WARM_UP + steps * repeats)
    adapted = adapt_recipe(recipe, threads=threads, num_steps=num_steps)
    found: list[_OverheadTimes] = launch(
        _run, num_ranks, (adapted, steps, repeats), device=recipe.train.device, hang_after_s=None
    )
    return _summarise(found, adapted, steps)


@dataclass(frozen=True)
class _OverheadTimes:
    """The seconds of a step on one rank, the mean of each block."""

    total_s: list[float]
    compute_s: list[float]
    exposed_s: list[float]
    device: str
    num_parameters: int
    gradient_bytes: int


def _run(recipe: Recipe, steps: int, repeats: int) -> _OverheadTimes:
    with open_bench(recipe) as bench:
        trained = [p for p in bench.trainer.model.parameters() if p.requires_grad]
        times = _OverheadTimes(
            [],
            [],
            [],
            bench.world.device.type,
            bench.num_parameters,
            sum(p.numel() * p.element_size() for p in trained),
        )
        for alone in (False, True):
            _run_block(bench, NUM_WARM_UP, alone=alone)
        for number in range(repeats):
            for alone in (False, True) if number % 2 == 0 else (True, False):
                step_s, exposed_s = _run_block(bench, steps, alone=alone)
                if alone:
                    times.compute_s.append(step_s)
                else:
                    times.total_s.append(step_s)
                    times.exposed_s.append(exposed_s)
        return times


def _run_block(bench: Bench, steps: int, *, alone: bool) -> tuple[float, float]:
    """Return the seconds per step, and those of them spent waiting."""
    shares = [next(bench.shares) for _ in range(steps)]  # Reading data belongs to neither.
    bench.synchronise()
    start_s = time.perf_counter()
    with bench.trainer.without_communication() if alone else nullcontext():
        taken = [bench.trainer.step(share) for share in shares]
    bench.world.wait_for_device()
    step_s = (time.perf_counter() - start_s) / steps
    return step_s, fmean(step.comm_s for step in taken)


def _summarise(found: list[_OverheadTimes], recipe: Recipe, steps: int) -> Overhead:
    first = found[0]
    total_s = [max(block) for block in zip(*(times.total_s for times in found), strict=True)]
    compute = list(zip(*(times.compute_s for times in found), strict=True))
    slowest_s = [max(block) for block in compute]
    exposed_s = fmean(fmean(times.exposed_s) for times in found)
    return Overhead(
        num_ranks=len(found),
        total_s=Spread.of(total_s),
        compute_s=Spread.of(slowest_s),
        comm_share=Spread.of(1 - alone / total for alone, total in zip(slowest_s, total_s, strict=True)),
        exposed_share=exposed_s / fmean(total_s),
        imbalance=1 - fmean(map(fmean, compute)) / fmean(slowest_s),
        num_parameters=first.num_parameters,
        gradient_bytes=first.gradient_bytes,
        global_batch_size=recipe.train.global_batch_size,
        microbatch_size=recipe.train.microbatch_size,
        device=first.device,
        threads_per_rank=recipe.train.threads_per_rank,  # type: ignore[arg-type]  # a number by now
        num_cores=usable_cores(),
        num_steps=steps,
        num_repeats=len(total_s),
    )
