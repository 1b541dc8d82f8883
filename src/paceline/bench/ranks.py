"""Builds a recipe's own trainer and data on the ranks of a benchmark, without a run's folder.

No files of a run are read or written, so steps include neither metrics nor checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.data import build_data
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.place import usable_cores
from paceline.recipe import Recipe
from paceline.recipe.layout import Layout
from paceline.train.run import build_loader, build_trainer
from paceline.train.trainer import Trainer
from paceline.world import World, start

# The first step counts operations; the second lets DDP rearrange its buckets by what it has seen.
NUM_WARM_UP = 3


def choose_threads(recipe: Recipe, max_ranks: int) -> int:
    """Return the threads per rank for all numbers of ranks alike: the recipe's, or cores / most ranks."""
    threads = recipe.train.threads_per_rank
    return max(1, usable_cores() // max_ranks) if threads == "auto" else threads


def adapt_recipe(recipe: Recipe, *, threads: int, num_steps: int, grow: int = 1) -> Recipe:
    """Return the recipe as a benchmark runs it.

    Args:
        recipe: of the run.
        threads: CPU threads of every rank.
        num_steps: length, for the schedule; passes over the data do not end it.
        grow: factor on the global batch.
    """
    train = recipe.train.model_copy(
        update={
            "steps": num_steps,
            "epochs": None,
            "threads_per_rank": threads,
            "global_batch_size": recipe.train.global_batch_size * grow,
        }
    )
    return recipe.with_layout(Layout(), train=train)


def check_counts(**counts: int) -> None:
    """Raise PL620 for a number below 1."""
    for name, count in counts.items():
        if count < 1:
            raise PacelineError(
                "PL620",
                saw=f"{name}={count}.",
                rule="Ranks, steps and repeats are numbers of at least 1.",
                fix=f"Use for example {name}=2.",
            )


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
