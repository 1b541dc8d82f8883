"""Losses of the first 20 steps with the fast reduction on 1, 2, 3 and 4 ranks, against those of one rank.

    python benchmarks/same_numbers/run.py            # all of README.md, some minutes on two cores

Train mode, dropout on, the same recipe everywhere; then, without dropout and BatchNorm, microbatches of
1, 4 and 16 samples against each other. Prints a table and writes it to results.txt; exit code 1 where a
difference is above its bound.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.data import build_data, prepare_data
from paceline.launching.local import launch
from paceline.recipe import Recipe, load_recipe
from paceline.train.run import build_loader, build_trainer
from paceline.world import start

HERE = Path(__file__).parent
RECIPES = HERE.parent.parent / "recipes"
NUM_STEPS = 20
RANKS = (1, 2, 3, 4)
BOUNDS = {"fp64": 1e-12, "fp32": 1e-5}


@dataclass(frozen=True)
class Case:
    """One recipe with settings; `group` names the cases whose losses must be the same."""

    group: str
    recipe: Recipe

    @property
    def dtype(self) -> str:
        return self.recipe.train.dtype


def list_cases() -> list[Case]:
    cases = []
    for dtype in BOUNDS:
        for name, settings in (
            ("gpt-stdlib", ["model.dropout=0.1"]),
            ("encoder-dropout", []),
            ("resnet-digits", ["train.epochs=none"]),
        ):
            common = ["train.steps=300", f"train.dtype={dtype}", "train.reduction=fast", *settings]
            cases.append(Case(f"{name}, {dtype}", load_recipe(RECIPES / f"{name}.toml", common)))
        for name in ("gpt-stdlib", "encoder-dropout"):
            for size in (1, 4, 16):
                settings = [
                    "model.dropout=0.0",
                    f"train.microbatch_size={size}",
                    "train.global_batch_size=16",
                ]
                common = ["train.steps=300", f"train.dtype={dtype}", "train.reduction=fast", *settings]
                recipe = load_recipe(RECIPES / f"{name}.toml", common)
                cases.append(Case(f"{name} without dropout, microbatches of 1, 4 and 16, {dtype}", recipe))
    return cases


def find_losses(recipes: list[Recipe]) -> list[list[float]]:
    """On each rank: the losses of each recipe's first steps."""
    found = []
    with start(device="cpu", threads_per_rank=1, deterministic=True):
        for recipe in recipes:
            data = build_data(recipe)
            trainer = build_trainer(recipe, data, 300)  # the schedule of a longer run
            loader = build_loader(recipe, trainer, data.train, train=True)
            losses: list[float] = []
            while len(losses) < NUM_STEPS:
                for share in loader:
                    losses.append(trainer.step(share).loss)
                    if len(losses) == NUM_STEPS:
                        break
            found.append(losses)
    return found


def find_difference(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def main() -> int:
    cases = list_cases()
    recipes = [case.recipe for case in cases]
    for recipe in recipes:
        prepare_data(recipe)
    losses = {num_ranks: launch(find_losses, num_ranks, (recipes,))[0] for num_ranks in RANKS}
    references: dict[str, list[float]] = {}
    for number, case in enumerate(cases):
        references.setdefault(case.group, losses[1][number])
    lines = [
        f"torch {torch.__version__}, {platform.machine()}, 1 thread per rank, {NUM_STEPS} steps; "
        "largest relative difference of a loss to one rank's",
        f"{'recipe':<66} {'micro':>5} {'bound':>6}  "
        + "  ".join(f"{n} rank{'s' * (n > 1):<1}" for n in RANKS),
    ]
    is_good = True
    for number, case in enumerate(cases):
        bound = BOUNDS[case.dtype]
        differences = [find_difference(losses[n][number], references[case.group]) for n in RANKS]
        is_good = is_good and max(differences) <= bound
        verdict = "" if max(differences) <= bound else "  TOO MUCH"
        cells = "  ".join(f"{difference:7.1e}" for difference in differences)
        size = case.recipe.train.microbatch_size
        lines.append(f"{case.group:<66} {size:>5} {bound:>6.0e}  {cells}{verdict}")
    text = "\n".join(lines)
    print(text)
    (HERE / "results.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
