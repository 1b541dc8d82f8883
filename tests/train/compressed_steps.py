"""Trains a model of one million parameters with each kind of compression; a rank of test_compress_nodes.py.

python tests/train/compressed_steps.py KINDS LAYOUTS [SLOTS]   prints a JSON line per run on rank 0

KINDS and LAYOUTS are joined by commas; a layout is an axis that gets all ranks. SLOTS is 4 by default.
The kind `islands-int8` has as many islands as slots, with this codec.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
from torch import nn

import paceline

NUM_STEPS = 4
TIMEOUT_S = 120.0


def train(kind: str, layout: str, slots: int) -> str:
    """Return the hash of the weights after some steps, of which the third has an infinite sample."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"compress": {"kind": kind, "slots": slots}}
    if kind.startswith("islands-"):
        codec = kind.removeprefix("islands-")
        settings = {"islands": {"count": slots, "every": 2, "warmup_steps": 1, "codec": codec}}
    trainer = paceline.Trainer(
        nn.Sequential(nn.Linear(512, 1000), nn.GELU(), nn.Linear(1000, 500), nn.GELU(), nn.Linear(500, 33)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        microbatch_size=2,
        layout=layout,
        **settings,
    )
    samples = torch.randn(16 * NUM_STEPS, 512, generator=torch.Generator().manual_seed(1))
    samples[40] = torch.inf
    for share in trainer.loader(samples, global_batch_size=16, shuffle=False):
        trainer.step(share)
    assert trainer.step_number == NUM_STEPS
    trainer.synchronize()
    digest = hashlib.sha256()
    for whole in trainer.whole_state().values():
        digest.update(whole.numpy().tobytes())
    return digest.hexdigest()


def main(kinds: list[str], layouts: list[str], slots: str = "4") -> None:
    with paceline.start(device="cpu", threads_per_rank=1, timeout_s=TIMEOUT_S) as world:
        for kind in kinds:
            for layout in layouts:
                start_s = time.perf_counter()
                degrees = f"{layout}={world.world_size}" if world.world_size > 1 else ""
                found = train(kind, degrees, int(slots))
                if world.is_main:
                    seconds = time.perf_counter() - start_s
                    print(json.dumps([kind, layout, found, round(seconds, 1)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","), *sys.argv[3:])
