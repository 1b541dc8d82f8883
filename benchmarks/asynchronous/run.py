"""Measures what asynchronous updates win with a slow rank, and what their staleness costs.

    python benchmarks/asynchronous/run.py speed    # updates per second against synchronous steps
    python benchmarks/asynchronous/run.py bound    # staleness in 10,000 updates
    python benchmarks/asynchronous/run.py loss     # of recipes/gpt-stdlib.toml, by staleness

In `speed` and `bound`, a microbatch takes as long as a rank sleeps, so the numbers are those of ranks with an
accelerator each, however many cores there are. The last rank is four times slower. `loss` replays records in
which every update has the same staleness, on one rank: its numbers do not depend on the machine. Results are
added to results.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.recipe import dump_recipe, load_recipe

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "recipes" / "gpt-stdlib.toml"
NPROC, SLOWER = 4, 4


def build(world: Any, pause_s: float) -> tuple[Any, Any]:
    torch.manual_seed(0)
    own_s = pause_s * (SLOWER if world.rank == NPROC - 1 else 1)

    def loss(output: torch.Tensor, batch: torch.Tensor) -> Any:
        time.sleep(own_s)
        return (output - batch[:, :1]).square().sum(), len(batch)

    trainer = paceline.Trainer(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3),
        microbatch_size=4,
        reduction="exact",
    )
    samples = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
    return trainer, trainer.loader(samples, global_batch_size=16, epochs=100)


def measure_speed(num_rounds: int, staleness: int) -> list[tuple[float, float]]:
    """Return (synchronous, asynchronous) updates per second of each round."""
    with paceline.start() as world:
        trainer, loader = build(world, 0.01)
        found = []
        for number in range(num_rounds + 1):  # the first one warms up
            num_steps, started_s = 20, time.perf_counter()
            for share in loader:
                trainer.step(share)
                if trainer.step_number % num_steps == 0:
                    break
            sync_s, started_s = time.perf_counter() - started_s, time.perf_counter()
            for _ in trainer.step_asynchronously(loader, 3 * num_steps, staleness=staleness):
                pass
            if number:
                found.append((num_steps / sync_s, 3 * num_steps / (time.perf_counter() - started_s)))
    return found


def measure_bound(num_steps: int, staleness: int) -> dict[str, float]:
    """Return the staleness of many short updates."""
    with tempfile.TemporaryDirectory() as own, paceline.start() as world:
        trainer, loader = build(world, 0.0005)
        trainer.resume(world.broadcast_object(own))
        for _ in trainer.step_asynchronously(loader, num_steps, staleness=staleness):
            pass
        rows = []
        if world.is_main:
            text = (trainer.run_folder / "updates.jsonl").read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.splitlines()]
        world.barrier()
    found = [row["step"] - 1 - row["version"] for row in rows]
    return {"updates": len(found), "largest": max(found, default=0), "mean": statistics.fmean(found or [0])}


def measure_loss(staleness: int, steps: int, lr: float) -> float:
    """Return the validation loss of a run whose updates all have this staleness."""
    settings = [
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        "checkpoint.every=0",
        f"optimizer.lr={lr}",
    ]
    settings += ["asynchronous.staleness=1", "train.reduction=exact"]
    words = [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-m", "paceline", "train", str(RECIPE), *words, "--nproc", "1", "--out"]
    with tempfile.TemporaryDirectory() as name:
        record, out = Path(name) / "record", Path(name) / "run"
        record.mkdir()
        (record / "recipe.toml").write_text(dump_recipe(load_recipe(RECIPE, settings)), "utf-8")
        rows = (
            {"step": step + 1, "worker": 0, "version": max(0, step - staleness), "batch": step}
            for step in range(steps)
        )
        (record / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        replay = ["--replay-updates", str(record / "updates.jsonl")]
        subprocess.run([*command, str(out), *replay], check=True, stdout=subprocess.DEVNULL)
        row = (out / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(row)["loss"])


def keep(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with (HERE / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["speed", "bound", "loss"])
    parser.add_argument("--steps", type=int, help="updates of bound (10,000) or loss (1,000)")
    parser.add_argument("--lr", type=float, nargs="*", default=[5e-3, 1e-3])
    args = parser.parse_args()
    if args.part == "speed":
        for staleness in (3, 8, 16, 32):
            rounds = paceline.launch(measure_speed, NPROC, args=(5, staleness))[0]
            ratios = [after / before for before, after in rounds]
            sync, apart = (statistics.median(each) for each in zip(*rounds, strict=True))
            row = {"part": "speed", "staleness": staleness, "synchronous_per_s": sync}
            keep(row | {"asynchronous_per_s": apart, "ratio": statistics.median(ratios), "ratios": ratios})
    elif args.part == "bound":
        for staleness in (1, 4, 16):
            found = paceline.launch(measure_bound, NPROC, args=(args.steps or 10_000, staleness))[0]
            keep({"part": "bound", "staleness": staleness, **found})
    else:
        for lr in args.lr:
            for staleness in (0, 1, 3, 7, 15):
                loss = measure_loss(staleness, args.steps or 1000, lr)
                keep(
                    {
                        "part": "loss",
                        "steps": args.steps or 1000,
                        "lr": lr,
                        "staleness": staleness,
                        "loss": loss,
                    }
                )


if __name__ == "__main__":
    main()
