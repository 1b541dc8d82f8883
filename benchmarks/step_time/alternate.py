"""Times variants against each other on the same ranks, in short alternating blocks."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loops import VARIANTS, Job

import paceline
from paceline.data import build_data
from paceline.recipe import Recipe


@dataclass(frozen=True)
class Times:
    """What one rank measured.

    Attributes:
        block_s: per variant, seconds of each of its blocks, in order of time.
        losses: per variant, the loss of the last step: all of them have learned about the same.
        num_parameters: of the model.
    """

    block_s: dict[str, list[float]]
    losses: dict[str, float]
    num_parameters: int


def run_rank(recipe: Recipe, names: list[str], num_blocks: int, block_steps: int, warm_up: int) -> Times:
    """Runs on every rank: blocks of all variants in order, then in reverse order, and so on.

    Every variant lives in this process and keeps its own model, optimizer and loader. Paceline's steps run
    as its recipes do by default, with deterministic kernels only; the others with torch's defaults.
    """
    warnings.simplefilter("ignore", FutureWarning)  # peers call what torch 2.13 has renamed
    train = recipe.train
    with (
        tempfile.TemporaryDirectory() as folder,
        paceline.start(
            device=train.device,
            timeout_s=train.timeout_s,
            seed=train.seed,
            threads_per_rank=train.threads_per_rank,
            deterministic=train.deterministic,
        ) as world,
    ):
        job = Job(recipe, build_data(recipe), world, Path(folder))
        loops = {name: VARIANTS[name](job) for name in names}
        block_s: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, Any] = {}

        def run_block(name: str, steps: int) -> float:
            torch.use_deterministic_algorithms(name == "paceline" and train.deterministic)
            loop = loops[name]
            world.barrier()
            start_s = time.perf_counter()
            for _ in range(steps):
                losses[name] = next(loop)
            return time.perf_counter() - start_s

        for name in names:
            run_block(name, warm_up)
        for number in range(num_blocks):
            for name in names if number % 2 == 0 else reversed(names):
                block_s[name].append(run_block(name, block_steps))
        world.barrier()
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
    return Times(block_s, {name: float(loss) for name, loss in losses.items()}, num_parameters)
