"""Trains four islands that save at every exchange; a rank of test_islands_nodes.py.

python tests/train/island_steps.py FOLDER     prints each step, and at the end the hash of the weights
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch
from torch import nn

import paceline

NUM_STEPS, EVERY, WARMUP_STEPS = 60, 10, 5


def loss_of(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
    time.sleep(0.02)
    return output.square().sum(), len(output)


def main(folder: str) -> None:
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        torch.manual_seed(0)
        trainer = paceline.Trainer(
            nn.Sequential(nn.Linear(256, 500), nn.GELU(), nn.Linear(500, 33)),
            loss=loss_of,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
            microbatch_size=4,
            reduction="exact",
            islands={"count": 4, "every": EVERY, "warmup_steps": WARMUP_STEPS, "codec": "int4"},
        )
        trainer.resume(folder)
        samples = torch.randn(16 * NUM_STEPS, 256, generator=torch.Generator().manual_seed(1))
        for share in trainer.loader(samples, global_batch_size=16, shuffle=False):
            trainer.step(share)
            if world.is_main:
                print("step", trainer.step_number, flush=True)
            if trainer.step_number % EVERY == WARMUP_STEPS:
                trainer.save()
        trainer.synchronize()
        state = trainer.whole_state()
        if world.is_main:
            found = hashlib.sha256(b"".join(each.numpy().tobytes() for each in state.values()))
            print("hash", found.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
