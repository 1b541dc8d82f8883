"""Measures the loss of islands against plain training on the same tokens, over seeds.

    python benchmarks/islands/run.py                        # the frontier of docs/slow_networks.md
    python benchmarks/islands/run.py --seeds 5 --only "every=20" --only plain

Each run is `paceline train recipes/gpt-islands.toml` on one rank, whose islands take turns: the losses are
those of any number of ranks, to the last bit, and do not depend on the machine's load. Results are added to
results.jsonl beside this file, and runs that it has are not repeated. The table has the mean validation loss,
its standard error over seeds, and the mean difference from plain training of the same seed with its standard
error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "recipes" / "gpt-islands.toml"
RESULTS = HERE / "results.jsonl"
SETTINGS = {
    "plain": ["islands.count=1"],
    "every=20": ["islands.every=20", "islands.codec=none"],
    "every=20 int8": ["islands.every=20", "islands.codec=int8"],
    "every=40 int4": ["islands.every=40", "islands.codec=int4"],
    "every=20 without warm-up": ["islands.every=20", "islands.codec=none", "islands.warmup_steps=0"],
    "every=20 4 islands": ["islands.every=20", "islands.codec=none", "islands.count=4"],
    "every=20 average of weights": [
        *("islands.every=20", "islands.codec=none", "islands.outer.lr=1.0", "islands.outer.momentum=0.0"),
    ],
    "every=20 lr 0.7 momentum 0.9": [
        *("islands.every=20", "islands.codec=none", "islands.outer.lr=0.7", "islands.outer.momentum=0.9"),
    ],
    **{
        f"every={every}{codec and f' {codec}'} momentum {momentum}": [
            *(
                f"islands.every={every}",
                f"islands.codec={codec or 'none'}",
                f"islands.outer.momentum={momentum}",
            ),
        ]
        for every in (10, 20, 50)
        for codec in ("", "int8", "int4")
        for momentum in (0.5, 0.7, 0.8)
    },
}


def train(name: str, seed: int, steps: int) -> float:
    """Return the validation loss of one run."""
    settings = [*SETTINGS[name], f"train.seed={seed}", f"train.steps={steps}", f"train.eval_every={steps}"]
    words = [word for each in settings for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", str(RECIPE), "--nproc", "1", "--out", folder]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        row = (Path(folder) / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(row)["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", action="append", choices=SETTINGS, help="settings to run; default: all")
    args = parser.parse_args()
    known: dict[tuple[str, int, int], float] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[row["name"], row["seed"], row["steps"]] = row["loss"]
    names = args.only or list(SETTINGS)
    for seed in range(args.seeds):
        for name in dict.fromkeys(["plain", *names]):
            if (name, seed, args.steps) not in known:
                loss = known[name, seed, args.steps] = train(name, seed, args.steps)
                with RESULTS.open("a", encoding="utf-8") as file:
                    row = {"name": name, "seed": seed, "steps": args.steps, "loss": loss}
                    file.write(json.dumps(row) + "\n")
    print(f"| {args.steps} steps, {args.seeds} seeds | validation loss | against plain |\n|---|---|---|")
    for name in names:
        losses = [known[name, seed, args.steps] for seed in range(args.seeds)]
        changes = [known[name, s, args.steps] / known["plain", s, args.steps] - 1 for s in range(args.seeds)]
        print(f"| {name} | {describe(losses, '.3f')} | {describe(changes, '+.2%')} |")


def describe(values: list[float], form: str) -> str:
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(statistics.stdev(values) / len(values) ** 0.5, form.lstrip('+'))}"


if __name__ == "__main__":
    main()
