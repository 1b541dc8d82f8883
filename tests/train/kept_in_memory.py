"""A script for `paceline run`: saves into memory after each step, and ranks are killed in some starts.

    kept_in_memory.py FOLDER LAYOUT DISK_STEP KILL_STEP NUM_STEPS NUM_KILLS [flip | one]

With `one`, rank 0 is not killed: it ends by the error that follows from the death of the other ranks.
Rank 0 prints the step that a start goes on from, and in the end a hash of weights and optimizer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import paceline
from paceline.checkpoint.memory.held_states import HeldPlace, _list_keepers
from tests.train.test_saving import Samples, build_trainer, describe, steps


def flip_newest(folder: Path, step: int) -> None:
    """Change a byte of the newest state in the memory of rank 0's keeper."""
    keepers = _list_keepers(folder.absolute(), os.getppid())
    flip(
        [
            each
            for _, (_, held) in keepers
            for each in held
            if (each.share.writer, each.share.step) == (0, step)
        ]
    )


def flip(held: Sequence[HeldPlace]) -> None:
    """Change a byte of the first file of the only share."""
    (only,) = held
    _, start, size = only.share.files[0]
    with open(only.path, "r+b", buffering=0) as memory:
        memory.seek(start + size - 5)
        (byte,) = memory.read(1)
        memory.seek(start + size - 5)
        memory.write(bytes([byte ^ 1]))


def main() -> None:
    """Train to the end, unless it is killed."""
    with paceline.start(device="cpu", threads_per_rank=1, seed=1) as world:
        try:
            train(world)
        except Exception as error:
            print(f"rank {world.rank} ends by {type(error).__name__}", flush=True)
            raise


def train(world: paceline.World) -> None:
    """Save after each step, and die after one of them."""
    folder, layout, *numbers = sys.argv[1:7]
    disk_step, kill_step, num_steps, num_kills = map(int, numbers)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    trainer = build_trainer(layout, asynchronous_saves=False)
    trainer.loader(Samples(), global_batch_size=8, name="train")
    first = trainer.resume(folder)
    if world.is_main:
        print(f"from {first}", flush=True)
    for number in steps(trainer, num_steps - first):
        trainer.save(wait=True) if number == disk_step else trainer.save_to_memory()
        if number == kill_step and attempt < num_kills:
            memory = trainer._saver.saving.memory
            memory._finish()
            memory._receive(memory._num_behind, None)
            dist.barrier()
            if "flip" in sys.argv[7:] and world.is_main:
                flip_newest(Path(folder), number)
            dist.barrier()
            if "one" not in sys.argv[7:] or not world.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
    found = describe(trainer)
    if world.is_main:
        print(f"hash {found}", flush=True)
    dist.barrier()
    trainer.close()


if __name__ == "__main__":
    main()
