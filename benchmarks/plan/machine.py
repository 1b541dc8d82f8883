"""Compares plans with measured steps on this machine: probes it, then trains each legal layout.

    python benchmarks/plan/machine.py [--nproc 2] [--steps 30] [--write]

For each model, every legal layout (one schedule, no recompute) is planned from the probe and then trained.
`--write` adds the residuals to src/paceline/plan/fitted.json as the interval of probed clusters.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.plan.cluster import read_file
from paceline.plan.fit import find_quantiles, load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.step import StepModel
from paceline.recipe import Rules, load_recipe

MODELS = {
    "small": ["model.layers=2"],
    "wide": ["model.layers=4", "model.hidden=256", "model.heads=8"],
    "deep": ["model.layers=8", "model.hidden=128", "train.microbatch_size=2"],
}
RECIPE = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"
TARGET = Path(__file__).parents[2] / "src" / "paceline" / "plan" / "fitted.json"
PACELINE = (sys.executable, "-m", "paceline")


def measure(settings: list[str], layout: object, nproc: int, folder: Path) -> float | None:
    """Return the median step of a training, None if it failed."""
    words = [word for setting in settings for word in ("--set", setting)]
    words += [word for pair in str(layout).split() for word in ("--set", f"layout.{_quote(pair)}")]
    command = [
        *PACELINE,
        "train",
        str(RECIPE),
        "--nproc",
        str(nproc),
        "--out",
        str(folder),
        "--no-watch",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-500:])
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_s"] for row in rows[5:])


def _quote(pair: str) -> str:
    name, _, value = pair.partition("=")
    return pair if value.isdigit() or value in ("true", "false") else f'{name}="{value}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    base = [f"train.steps={args.steps}", "train.eval_every=0", "train.eval_samples=16", "checkpoint.every=0",
            "optimizer.warmup_steps=5"]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "cluster.toml"
        subprocess.run(
            [*PACELINE, "probe", "--nproc", str(args.nproc), "--device", "cpu", "--out", str(file)],
            check=True,
        )
        cluster, fit = read_file(file), load_constants()
        residuals, names = [], []
        for model, settings in MODELS.items():
            recipe = load_recipe(str(RECIPE), [*settings, *base])
            legal, _ = Rules.of(recipe).enumerate(args.nproc)
            step = StepModel(of_recipe(recipe), cluster, fit)
            rows = []
            for number, layout in enumerate(legal):
                taken = measure([*settings, *base], layout, args.nproc, Path(name) / f"{model}-{number}")
                if taken is not None:
                    rows.append((step.time(layout).total, taken, layout))
            rows.sort(key=lambda row: row[0])
            best = min(taken for _, taken, _ in rows)
            for predicted, taken, layout in rows:
                residuals.append(math.log(taken / predicted))
                names.append(model)
                print(
                    f"{model:<7}{predicted * 1e3:>9.1f} ms{taken * 1e3:>9.1f} ms"
                    f"{predicted / taken - 1:>+7.0%}  {layout}"
                )
            print(
                f"{model:<7}the pick takes {rows[0][1] / best - 1:.0%} longer than the best of {len(rows)}",
                flush=True,
            )
        sizes = [abs(math.exp(-each) - 1) for each in residuals]
        print(f"median error {statistics.median(sizes):.0%} of {len(sizes)}")
        if args.write:
            table = json.loads(TARGET.read_text())
            table["bars"]["probed"] = {
                f"{level:g}": [round(end, 4) for end in find_quantiles(residuals, names, level)]
                for level in (0.5, 0.8, 0.9)
            }
            TARGET.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
