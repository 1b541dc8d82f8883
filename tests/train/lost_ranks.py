"""A script for `paceline run`: trains, and ranks of the first start are lost at a place inside of a step.

    lost_ranks.py FOLDER LAYOUT NUM_STEPS DISK_STEP [RANKS STEP PLACE] [OPTION...]

RANKS are numbers with commas. PLACE is where they get SIGKILL: `forward`, `update` or `update of one`. With
`error`, they raise an error in the forward. With `update`, the other ranks fail inside of their updates too;
with `update of one`, they go on to the next step.
OPTION `track` tracks an object, `hook` sets a communication hook, `off` turns the feature off.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from tests.train.test_saving import Counting, Samples

WIDTH = 24


class Faults:
    """The ranks that are lost, and where."""

    def __init__(self, words: list[str], rank: int) -> None:
        self.place, self.step, self.is_lost = "", 0, False
        if words and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            ranks, step, self.place = words
            self.step, self.is_lost = int(step), str(rank) in ranks.split(",")

    def strike(self, place: str, step: int) -> None:
        """Lose this rank, if it is to be lost here."""
        if step != self.step or self.place not in (place, "error"):
            return
        if place == "update" and not self.is_lost:
            time.sleep(0.5)  # the lost rank has gone
            raise RuntimeError("Connection closed by peer")
        if self.is_lost and self.place == "error" and place == "forward":
            raise ValueError("the user's code fails")
        if self.is_lost and self.place == place:
            time.sleep(0.3)  # the others wait in a collective
            os.kill(os.getpid(), signal.SIGKILL)


class Sgd(torch.optim.AdamW):
    """An optimizer in whose step ranks may be lost, after it has changed the first weights."""

    faults: Faults
    trainer: paceline.Trainer

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for place in ("update", "update of one"):
            self.faults.strike(place, self.trainer.step_number)
        return found


def build_model(layout: str) -> nn.Module:
    """Return a model with dropout, and with BatchNorm where ranks hold all of it."""
    norm: nn.Module = nn.BatchNorm1d(2 * WIDTH)
    if "shard" in layout or "tp" in layout:
        norm = nn.Identity()
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(2 * WIDTH, 3)
    )


def train(world: paceline.World, folder: str, layout: str, words: list[str]) -> None:
    """Train to the end, unless this rank is lost."""
    num_steps, disk_step = int(words[0]), int(words[1])
    options = {word for word in words[2:] if word in ("track", "hook", "off")}
    faults = Faults([word for word in words[2:] if word not in options], world.rank)
    drawn = torch.zeros(())

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        faults.strike("forward", trainer.step_number)
        output: Tensor = model(batch["x"]) * (1 + drawn)
        return output

    def build_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return Sgd([p for _, p in named], lr=0.05)

    settings: dict[str, Any] = {}
    if "hook" in options:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        settings = {"comm_hook": (None, allreduce_hook), "reduction": "fast"}
    trainer = paceline.Trainer(
        lambda: build_model(layout),
        forward=forward,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=build_optimizer,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        layout=layout,
        microbatch_size=2,
        checkpoint_mode="sharded",
        memory_on_failure="off" not in options,
        **settings,
    )
    Sgd.faults, Sgd.trainer = faults, trainer
    if "track" in options:
        trainer.track(count=Counting())
    loader = trainer.loader(Samples(), global_batch_size=16, name="train")
    first = trainer.resume(folder)
    if world.is_main:
        print(f"from {first}", flush=True)
    while trainer.step_number < num_steps:
        for share in loader:
            drawn = torch.rand(())  # the loop's own draws go on
            number = trainer.step(share).number
            if number in (disk_step, num_steps):
                trainer.save(wait=True)
            if number == num_steps:
                break


def main() -> None:
    """Report the error by which this rank ends."""
    folder, layout, *words = sys.argv[1:]
    with paceline.start(device="cpu", threads_per_rank=1, seed=1) as world:
        try:
            train(world, folder, layout, words)
        except Exception as error:
            print(f"rank {world.rank} ends by {type(error).__name__}: {error}", flush=True)
            raise


if __name__ == "__main__":
    main()
