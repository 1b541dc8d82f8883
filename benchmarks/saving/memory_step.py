"""Compares steps of `make train` with a state in memory after each and without, in alternating blocks.

    python benchmarks/saving/memory_step.py                # recipes/gpt-stdlib.toml on 2 ranks
    python benchmarks/saving/memory_step.py --pairs 10     # a quick look
    python benchmarks/saving/memory_step.py --tables       # the last measurement

Two trainers of the same recipe live in the same ranks. One keeps a state in memory after each step, as with
checkpoint.memory_every = 1, and waits at the end of a block until the keepers hold the last one. Keeps raw
times in memory-step.json and their summary in memory-step.txt. Exit code 1 if the claim fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, SUMMARY = HERE / "memory-step.json", HERE / "memory-step.txt"
RECIPE = HERE.parent.parent / "recipes" / "gpt-stdlib.toml"
WITH, WITHOUT = "with", "without"
BLOCK_STEPS = 20
LIMIT = 1.05


def take_steps(trainer: Any, loader: Any, *, keeps: bool) -> Iterator[int]:
    """Yield the number of each step."""
    taken = 0
    while True:
        for share in loader:
            number = trainer.step(share).number
            taken += 1
            if keeps:
                trainer.save_to_memory()
                if taken % BLOCK_STEPS == 0:  # the end of a block: none of its work falls into the next one
                    memory = trainer._saver.saving.memory
                    memory._finish()
                    memory._receive(memory._num_behind, None)
            yield number


def work(num_pairs: int, out: str) -> None:
    """Measure, on every rank."""
    import paceline
    from paceline.bench.alternate import Conditions, alternate, join_ranks
    from paceline.data import build_data
    from paceline.recipe import load_recipe
    from paceline.train.run import build_loader, build_trainer
    from paceline.train.state.transfer import gather

    conditions = Conditions()
    recipe = load_recipe(RECIPE)
    with tempfile.TemporaryDirectory() as own, paceline.start(seed=recipe.train.seed) as world:
        folder = Path(world.broadcast_object(own))
        data = build_data(recipe)
        loops = {}
        for name in (WITH, WITHOUT):
            trainer = build_trainer(recipe, data, 1 << 20)
            trainer.resume(folder / name)
            loader = build_loader(recipe, trainer, data.train, train=True)
            loops[name] = take_steps(trainer, loader, keeps=name == WITH)
        times = alternate(
            world, loops, num_blocks=num_pairs, block_steps=BLOCK_STEPS, warm_up=2 * BLOCK_STEPS
        )
        found = join_ranks(gather(world, times))
        if world.is_main:
            table = {**conditions.read(f"{world.world_size} ranks, gloo"), **found}
            table["num_parameters"] = trainer.count_parameters()
            Path(out).write_text(json.dumps(table) + "\n")
        world.barrier()


def describe(table: dict[str, Any]) -> tuple[str, float]:
    """Return the summary, and the upper end of the ratio."""
    from paceline.bench.spread import Spread

    pairs = zip(table["block_s"][WITH], table["block_s"][WITHOUT], strict=True)
    cpu_pairs = zip(table["block_cpu_s"][WITH], table["block_cpu_s"][WITHOUT], strict=True)
    ratio = Spread.of(a / b for a, b in pairs)
    cpu = Spread.of(a / b for a, b in cpu_pairs)
    without_ms = [1e3 * each / BLOCK_STEPS for each in table["block_s"][WITHOUT]]
    text = (
        f"{table['machine']}\n{table['started']}, load before {table['load_before']:.2f}, after "
        f"{table['load_after']:.2f}; {RECIPE.name}, {table['num_parameters']:,} parameters, "
        f"{BLOCK_STEPS} steps per block, {ratio.num_values} pairs of blocks\n\n"
        f"A step without: {Spread.of(without_ms):.1f} ms. With a state in memory after each step, of one "
        f"without: {ratio:.3f}; the ranks' CPU time: {cpu:.3f} (that of the keepers is not in it).\n"
    )
    return text, ratio.high


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="of blocks (default 60)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", action="store_true", help="write the summary again")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.pairs, str(RESULTS))
        return 0
    if not args.tables:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(args.ranks), str(Path(__file__)), "--work", "--pairs", str(args.pairs)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    text, high = describe(json.loads(RESULTS.read_text()))
    SUMMARY.write_text(text)
    print(text)
    if high > LIMIT:
        print(f"missed: upper end {high:.3f}, wanted {LIMIT}")
    return 1 if high > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
