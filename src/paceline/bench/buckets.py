"""Tries sizes for the buckets in which gradients are summed, and finds the fastest.

Every size has a trainer of its own in the same processes: the same model, batches and threads. They take
turns in blocks, forwards and backwards through the list, so that a machine that slows down affects all. Each
block is compared with the neighbouring block of the recipe's own size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.ranks import NUM_WARM_UP, Bench, adapt_recipe, check_counts, choose_threads, open_bench
from paceline.bench.spread import Spread
from paceline.data import build_data, prepare_data
from paceline.errors import PacelineError
from paceline.launching.local import check_launch, launch
from paceline.place import usable_cores
from paceline.recipe import Recipe
from paceline.train.run import build_trainer
from paceline.train.trainer import Trainer

DEFAULT_SIZES = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
_MIB = 1 << 20


@dataclass(frozen=True)
class BucketSize:
    """The result for one size.

    Attributes:
        mib: in MiB.
        step_s: seconds per step, over blocks.
        ratio: step time over that with the recipe's own size, over pairs of blocks.
    """

    mib: float
    step_s: Spread
    ratio: Spread


@dataclass(frozen=True)
class Buckets:
    """The result of `measure_buckets`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        sizes: each size, the smallest first.
        own_mib: the recipe's own size.
        best_mib: the size with the smallest median ratio.
        is_better: whether the interval of its ratio ends below 1.
        num_ranks: how many.
        reduction: `"fast"` or `"exact"`.
        num_parameters: of the model.
        gradient_bytes: summed per step; a bucket that holds all of them is the only one.
        global_batch_size: samples per step over all ranks.
        microbatch_size: samples per forward.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same on all.
        num_cores: that this process may use.
        num_steps: in a block.
        num_repeats: blocks of each size.
    """

    sizes: list[BucketSize]
    own_mib: float
    best_mib: float
    is_better: bool
    num_ranks: int
    reduction: str
    num_parameters: int
    gradient_bytes: int
    global_batch_size: int
    microbatch_size: int
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int
    num_repeats: int


def measure_buckets(
    recipe: Recipe,
    num_ranks: int,
    sizes: Sequence[float] = DEFAULT_SIZES,
    *,
    steps: int = 5,
    repeats: int = 10,
) -> Buckets:
    """Time steps with buckets of several sizes, alternating in one run.

    Call it in a process that is not a rank itself: it starts ranks of its own.

    Args:
        recipe: what to train. Its layout, length and checkpoints play no part: all ranks are replicas.
        num_ranks: how many, 2 or more.
        sizes: in MiB; the recipe's own is always among them. Only the smallest size that holds all gradients
            is tried.
        steps: in a block.
        repeats: blocks of each size.

    Raises:
        PacelineError: PL620 for numbers below 1, PL622 for one rank, PL965 for sizes that are none, PL320 to
            PL326 for ranks that cannot be started.
    """
    check_counts(steps=steps, repeats=repeats, nproc=num_ranks)
    check_sizes(sizes)
    if num_ranks == 1:
        raise PacelineError(
            "PL622",
            saw="nproc=1.",
            rule="One rank does not communicate, so it has no buckets.",
            fix="Use two ranks or more: --nproc 2.",
        )
    check_launch(num_ranks, recipe.train.device)
    prepare_data(recipe)
    threads = choose_threads(recipe, num_ranks)
    adapted = adapt_recipe(recipe, threads=threads, num_steps=NUM_WARM_UP + steps * repeats)
    own = adapted.ddp.bucket_cap_mb
    found: list[_BucketTimes] = launch(
        _run,
        num_ranks,
        (adapted, sorted({own, *map(float, sizes)}), steps, repeats),
        device=recipe.train.device,
        hang_after_s=None,
    )
    return _summarise(found, adapted, steps)


def check_sizes(sizes: Sequence[float]) -> None:
    """Raise PL965 for sizes of buckets that are not positive numbers, or none."""
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise PacelineError(
            "PL965",
            saw=f"sizes of buckets {', '.join(f'{size:g}' for size in sizes) or '(none)'}.",
            rule="A bucket has a positive size in MiB.",
            fix="Write for example --sizes 5,25,100.",
        )


@dataclass(frozen=True)
class _BucketTimes:
    """The seconds of a step on one rank, the mean of each block, by size."""

    block_s: dict[float, list[float]]
    device: str
    num_parameters: int
    gradient_bytes: int


def _run(recipe: Recipe, sizes: list[float], steps: int, repeats: int) -> _BucketTimes:
    own = recipe.ddp.bucket_cap_mb
    with open_bench(recipe) as bench:
        data, num_steps = build_data(recipe), recipe.train.steps
        assert num_steps is not None
        trained = [p for p in bench.trainer.model.parameters() if p.requires_grad]
        gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        trainers = {
            size: bench.trainer if size == own else build_trainer(_with_size(recipe, size), data, num_steps)
            for size in keep_distinct(sizes, own, gradient_bytes)
        }
        block_s: dict[float, list[float]] = {size: [] for size in trainers}
        for trainer in trainers.values():
            _run_block(bench, trainer, NUM_WARM_UP)
        for number in range(repeats):
            for size in trainers if number % 2 == 0 else reversed(trainers):
                block_s[size].append(_run_block(bench, trainers[size], steps))
        return _BucketTimes(block_s, bench.world.device.type, bench.num_parameters, gradient_bytes)


def keep_distinct(sizes: Sequence[float], own: float, gradient_bytes: int) -> list[float]:
    """Return the sizes, and of those that hold all gradients the smallest and the recipe's own."""
    whole = [size for size in sizes if size * _MIB >= gradient_bytes]
    return [size for size in sizes if size not in whole[1:] or size == own]


def _run_block(bench: Bench, trainer: Trainer, steps: int) -> float:
    shares = [next(bench.shares) for _ in range(steps)]  # Reading data belongs to neither.
    bench.synchronise()
    start_s = time.perf_counter()
    for share in shares:
        trainer.step(share)
    bench.world.wait_for_device()
    return (time.perf_counter() - start_s) / steps


def _with_size(recipe: Recipe, size: float) -> Recipe:
    return recipe.model_copy(update={"ddp": recipe.ddp.model_copy(update={"bucket_cap_mb": size})})


def _summarise(found: list[_BucketTimes], recipe: Recipe, steps: int) -> Buckets:
    first, own = found[0], recipe.ddp.bucket_cap_mb
    # A step is over when the last rank has finished it.
    step_s = {
        size: [max(block) for block in zip(*(times.block_s[size] for times in found), strict=True)]
        for size in first.block_s
    }
    sizes = [
        BucketSize(
            size,
            Spread.of(blocks),
            Spread.of(one / other for one, other in zip(blocks, step_s[own], strict=True)),
        )
        for size, blocks in step_s.items()
    ]
    best = min(sizes, key=lambda size: size.ratio.median)
    return Buckets(
        sizes=sizes,
        own_mib=own,
        best_mib=best.mib,
        is_better=best.ratio.high < 1,
        num_ranks=len(found),
        reduction=recipe.train.reduction,
        num_parameters=first.num_parameters,
        gradient_bytes=first.gradient_bytes,
        global_batch_size=recipe.train.global_batch_size,
        microbatch_size=recipe.train.microbatch_size,
        device=first.device,
        threads_per_rank=recipe.train.threads_per_rank,  # type: ignore[arg-type]  # a number by now
        num_cores=usable_cores(),
        num_steps=steps,
        num_repeats=len(step_s[own]),
    )
