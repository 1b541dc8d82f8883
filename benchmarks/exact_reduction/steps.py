"""Measures the cost of the exact reduction: its steps against those of the fast one.

    python benchmarks/exact_reduction/steps.py RECIPE --nproc 2 [--steps 5] [--repeats 10] [--set KEY=VALUE]

Both kinds run in the same processes, in alternating blocks (A B, B A, A B ...), so that a machine that slows
down affects both. Each has its own model, optimizer and buckets and takes the same steps on the same batches,
with the same number of threads.

Denormal numbers count as zero in both. A processor takes many times longer for them, and two models whose
weights differ in their last bits meet them at different steps. That would be compared, not the reductions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.bench.spread import Spread
from paceline.bench.starts import NUM_WARM_UP, Measured, adapt_recipe, check_counts
from paceline.comm.tree import plan_reduction
from paceline.data import build_data, prepare_data
from paceline.data.share import Share
from paceline.launching.local import check_launch, launch
from paceline.place import usable_cores
from paceline.recipe import Recipe, load_recipe
from paceline.train.run import build_loader, build_trainer
from paceline.train.trainer import Trainer
from paceline.units import format_bytes, format_count
from paceline.world import World, start


@dataclass
class Bench:
    """The state of a rank that is ready to be timed.

    Attributes:
        world: the ranks.
        trainer: the recipe's.
        shares: this rank's share of one global batch after another, without end.
        tokens_per_sample: for text.
        num_parameters: of the model.
    """

    world: World
    trainer: Trainer
    shares: Iterator[Share]
    tokens_per_sample: int | None
    num_parameters: int

    def synchronise(self) -> None:
        """Wait for the device and for all ranks."""
        self.world.wait_for_device()
        self.world.barrier()


@contextmanager
def open_bench(recipe: Recipe) -> Iterator[Bench]:
    """Join the ranks and build the recipe's trainer and loader; collective.

    Args:
        recipe: from `adapt_recipe`.
    """
    train = recipe.train
    with start(
        device=train.device,
        timeout_s=train.timeout_s,
        seed=train.seed,
        threads_per_rank=train.threads_per_rank,
        deterministic=train.deterministic,
    ) as world:
        data = build_data(recipe)
        assert train.steps is not None
        trainer = build_trainer(recipe, data, train.steps)
        loader = build_loader(recipe, trainer, data.train, train=True)
        try:
            yield Bench(
                world=world,
                trainer=trainer,
                shares=_repeat(loader),
                tokens_per_sample=data.tokens_per_sample,
                num_parameters=sum(p.numel() for p in trainer.model.parameters()),
            )
        finally:
            loader.close()


def _repeat(loader: Any) -> Iterator[Share]:
    while True:
        yield from loader


@dataclass(frozen=True)
class Reduction:
    """The result of `measure_reduction`.

    Attributes:
        num_ranks: how many.
        fast_s: seconds per step with the fast reduction, over blocks.
        exact_s: the same with the exact one.
        ratio: exact over fast, over pairs of blocks.
        num_parameters: of the model.
        gradient_bytes: reduced per step.
        network_bytes: what the exact reduction sends per step, of the rank that sends most.
        ring_bytes: what a ring all-reduce sends per rank.
        global_batch_size: samples per step over all ranks.
        microbatch_size: samples per forward.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same on all.
        num_cores: that this process may use.
        num_steps: in a block.
        num_repeats: pairs of blocks.
        fast_blocks_s: every block's seconds per step, in order of time.
        exact_blocks_s: the same.
    """

    num_ranks: int
    fast_s: Spread
    exact_s: Spread
    ratio: Spread
    num_parameters: int
    gradient_bytes: int
    network_bytes: int
    ring_bytes: int
    global_batch_size: int
    microbatch_size: int
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int
    num_repeats: int
    fast_blocks_s: list[float]
    exact_blocks_s: list[float]


def measure_reduction(recipe: Recipe, num_ranks: int, *, steps: int = 5, repeats: int = 10) -> Reduction:
    """Time steps with the exact reduction against steps with the fast one, alternating in one run.

    Args:
        recipe: what to train. Its layout, length, reduction and checkpoints play no part.
        num_ranks: how many; on 1 rank only the order of the additions differs.
        steps: in a block.
        repeats: pairs of blocks.
    """
    check_counts(steps=steps, repeats=repeats, nproc=num_ranks)
    check_launch(num_ranks, recipe.train.device)
    prepare_data(recipe)
    threads = Measured(recipe=recipe).choose_threads(num_ranks)
    num_steps = NUM_WARM_UP + steps * repeats
    adapted = adapt_recipe(recipe, threads=threads, num_steps=num_steps)
    found: list[_ReductionTimes] = launch(
        _run, num_ranks, (adapted, steps, repeats), device=recipe.train.device, hang_after_s=None
    )
    return _summarise(found, adapted, steps)


@dataclass(frozen=True)
class _ReductionTimes:
    """The seconds of a step on one rank, the mean of each block."""

    block_s: dict[str, list[float]]
    device: str
    num_parameters: int
    gradient_bytes: int
    num_owned: tuple[int, ...]


def _run(recipe: Recipe, steps: int, repeats: int) -> _ReductionTimes:
    torch.set_flush_denormal(True)  # Threads that start later have it too.
    with open_bench(_with_reduction(recipe, "fast")) as bench:
        assert recipe.train.steps is not None
        exact = build_trainer(_with_reduction(recipe, "exact"), build_data(recipe), recipe.train.steps)
        trainers = {"fast": bench.trainer, "exact": exact}
        block_s: dict[str, list[float]] = {name: [] for name in trainers}
        for trainer in trainers.values():
            num_owned = _run_block(bench, trainer, NUM_WARM_UP)[1]
        for number in range(repeats):
            for name in trainers if number % 2 == 0 else reversed(trainers):
                block_s[name].append(_run_block(bench, trainers[name], steps)[0])
        trained = [p for p in exact.model.parameters() if p.requires_grad]
        return _ReductionTimes(
            block_s,
            bench.world.device.type,
            bench.num_parameters,
            sum(p.numel() * p.element_size() for p in trained),
            num_owned,
        )


def _run_block(bench: Bench, trainer: Trainer, steps: int) -> tuple[float, tuple[int, ...]]:
    """Return the seconds per step, and the number of microbatches that each rank had in the last one."""
    shares = [next(bench.shares) for _ in range(steps)]  # Reading data belongs to neither.
    bench.synchronise()
    start_s = time.perf_counter()
    for share in shares:
        trainer.step(share)
    bench.world.wait_for_device()
    return (time.perf_counter() - start_s) / steps, shares[-1].num_owned


def _with_reduction(recipe: Recipe, name: Literal["fast", "exact"]) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"reduction": name})})


def _summarise(found: list[_ReductionTimes], recipe: Recipe, steps: int) -> Reduction:
    first, num_ranks = found[0], len(found)
    # A step is over when the last rank has finished it.
    fast_s, exact_s = (
        [max(block) for block in zip(*(times.block_s[name] for times in found), strict=True)]
        for name in ("fast", "exact")
    )
    num_subtrees = max(map(len, plan_reduction(first.num_owned).subtrees))
    to_others = first.gradient_bytes * (num_ranks - 1) // num_ranks
    return Reduction(
        num_ranks=num_ranks,
        fast_s=Spread.of(fast_s),
        exact_s=Spread.of(exact_s),
        ratio=Spread.of(exact / fast for exact, fast in zip(exact_s, fast_s, strict=True)),
        num_parameters=first.num_parameters,
        gradient_bytes=first.gradient_bytes,
        network_bytes=(num_subtrees + 1) * to_others,
        ring_bytes=2 * to_others,
        global_batch_size=recipe.train.global_batch_size,
        microbatch_size=recipe.train.microbatch_size,
        device=first.device,
        threads_per_rank=recipe.train.threads_per_rank,  # type: ignore[arg-type]  # a number by now
        num_cores=usable_cores(),
        num_steps=steps,
        num_repeats=len(fast_s),
        fast_blocks_s=fast_s,
        exact_blocks_s=exact_s,
    )


def describe(found: Reduction) -> str:
    """Return the times and bytes as lines of text."""
    of_a_ring = found.network_bytes / found.ring_bytes if found.ring_bytes else 1.0
    return (
        f"{format_count(found.num_parameters)} parameters on {found.num_ranks} ranks, {found.device}, "
        f"{found.num_repeats} pairs of blocks of {found.num_steps} steps, "
        f"{found.ratio.confidence:.0%} confidence\n"
        f"step, fast    {_span(found.fast_s, 1e3, '.4g')} ms\n"
        f"step, exact   {_span(found.exact_s, 1e3, '.4g')} ms\n"
        f"exact / fast  {_span(found.ratio, 1.0, '.3f')}, pair by pair\n"
        f"sent          {format_bytes(found.network_bytes)} per rank and step, {of_a_ring:.2f} of a ring's"
    )


def _span(spread: Spread, scale: float, spec: str) -> str:
    low, middle, high = (scale * value for value in (spread.low, spread.median, spread.high))
    return f"{middle:{spec}} ({low:{spec}}..{high:{spec}})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--out", type=Path, help="keeps every block's time")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.settings)
    found = measure_reduction(recipe, args.nproc, steps=args.steps, repeats=args.repeats)
    if args.out is not None:
        args.out.write_text(json.dumps(asdict(found)), encoding="utf-8")
    print(describe(found))


if __name__ == "__main__":
    main()
