"""Compare gloo's event loop as ordinary and as batch work: isolated calls, and steps of training.

    python benchmarks/gloo_loop/run.py            # five minutes on two idle cores; writes results.txt
    python benchmarks/gloo_loop/run.py calls      # or: steps

The policy changes from block to block of one run, in the same processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POLICIES = {"other": os.SCHED_OTHER, "batch": os.SCHED_BATCH}
# Name: ranks, pairs of blocks, steps per block, settings of the recipe.
TRAININGS: dict[str, tuple[int, int, int, list[str]]] = {
    "exact": (2, 16, 20, []),
    "fast": (2, 16, 20, ["train.reduction=fast"]),
    "fast, 11M": (
        2,
        24,
        3,
        ["train.reduction=fast", "model.hidden=384", "model.layers=6", "model.heads=6"],
    ),
    "fast, 4 ranks": (4, 12, 10, ["train.reduction=fast"]),
    "dp_shard": (2, 14, 10, ["layout.dp_shard=2", "layout.dp_replicate=1"]),
    "tp": (2, 14, 10, ["layout.tp=2", "layout.dp_replicate=1"]),
}
CALLS_PER_TURN, TURNS = 15, 6


def set_policy(policy: int) -> None:
    """Schedule the event loops of this process."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "gloo_tcp_loop":
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def time_calls() -> None:
    """Time isolated calls, on every rank."""
    import torch
    import torch.distributed as dist
    from common_clock import CommonClock

    from paceline.world import start

    with start(device="cpu", threads_per_rank=1) as world:
        # Newer versions of torch have the first name, older ones the second.
        gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        small, large = torch.zeros(16), torch.zeros(1 << 18)
        gathered = torch.zeros(16 * world.world_size)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce of 64 B": lambda: dist.all_reduce(small),
            "all_reduce of 1 MiB": lambda: dist.all_reduce(large),
            "all_gather of 64 B": lambda: gather_whole(gathered, small),
            "broadcast of 64 B": lambda: dist.broadcast(small, 0),
        }
        clock = CommonClock(world)
        for call in calls.values():
            clock.time(call)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(TURNS):
            for policy, number in POLICIES.items():
                set_policy(number)
                for name, call in calls.items():
                    found = times.setdefault((name, policy), [])
                    found += [1e3 * clock.time(call) for _ in range(CALLS_PER_TURN)]
        for name in calls if world.is_main else ():
            cells = []
            for policy in POLICIES:
                low, middle, high = statistics.quantiles(times[name, policy], n=4)
                cells.append(f"{middle:6.2f} ({low:.2f} to {high:.2f})")
            print(f"{name:22}{world.world_size} ranks  {cells[0]:26}{cells[1]}", flush=True)


def time_steps(name: str) -> None:
    """Time blocks of steps of one training, on every rank."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from alternate import alternate, join_ranks

    import paceline
    from paceline.bench.spread import Spread
    from paceline.data import build_data
    from paceline.recipe import load_recipe
    from paceline.train.run import build_loader, build_trainer
    from paceline.train.state.transfer import gather

    _, num_pairs, block_steps, settings = TRAININGS[name]
    recipe = load_recipe(ROOT / "recipes/gpt-stdlib.toml", [*settings, "train.steps=100000"])
    with tempfile.TemporaryDirectory() as own, paceline.start(seed=recipe.train.seed) as world:
        data = build_data(recipe)
        trainer = build_trainer(recipe, data, 1 << 20)
        trainer.resume(Path(world.broadcast_object(own)) / "run")
        loader = build_loader(recipe, trainer, data.train, train=True)

        def take_steps() -> Iterator[int]:
            while True:
                for share in loader:
                    yield trainer.step(share).number

        times = alternate(
            world,
            dict.fromkeys(POLICIES, take_steps()),
            num_blocks=num_pairs,
            block_steps=block_steps,
            warm_up=block_steps,
            before=lambda policy: set_policy(POLICIES[policy]),
        )
        found = join_ranks(gather(world, times))
        if world.is_main:
            by = found["block_s"]
            ratio = Spread.of(b / a for a, b in zip(by["other"], by["batch"], strict=True))
            ms = {p: 1e3 * statistics.median(by[p]) / block_steps for p in POLICIES}
            print(
                f"{name:16}{world.world_size} ranks, {trainer.count_parameters() / 1e6:5.2f}M"
                f"{ms['other']:10.1f}{ms['batch']:10.1f}   {ratio:.3f}",
                flush=True,
            )
        world.barrier()


def launch(num_ranks: int, *words: str) -> str:
    """Run this file on ranks, and return what rank 0 prints."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(Path(__file__)), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def main(words: list[str]) -> None:
    """Run the command line; ranks are given `--rank` and what they measure."""
    if words[:1] == ["--rank"]:
        time_calls() if words[1] == "calls" else time_steps(words[1])
        return
    lines = [f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"]
    if "calls" in words or not words:
        lines += ["", "isolated calls, ms, median (quartiles)   other                     batch"]
        lines += [line for ranks in (2, 4) for line in launch(ranks, "--rank", "calls").splitlines()]
    if "steps" in words or not words:
        lines += ["", "ms per step                         other     batch   ratio (95% interval)"]
        lines += [
            line for name, row in TRAININGS.items() for line in launch(row[0], "--rank", name).splitlines()
        ]
    text = "\n".join(lines) + "\n"
    (HERE / "results.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
