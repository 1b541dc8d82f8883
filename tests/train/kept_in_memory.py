"""A script for `paceline run`: saves into memory after each step, and all ranks are killed in some starts.

    kept_in_memory.py FOLDER LAYOUT DISK_STEP KILL_STEP NUM_STEPS NUM_KILLS [flip]

Rank 0 prints the step that a start goes on from, and in the end a hash of weights and optimizer.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.checkpoint.held_states import _list_keepers
from tests.train.test_saving import build_trainer, describe, steps


def flip_newest(folder: Path, step: int) -> None:
    """Changes a byte of the newest state in the memory of rank 0's keeper."""
    for _, (_, held) in _list_keepers(folder.absolute(), os.getppid()):
        for each in held:
            if each.share.writer == 0 and each.share.step == step:
                _, start, size = each.share.files[0]
                with open(each.path, "r+b", buffering=0) as memory:
                    memory.seek(start + size - 5)
                    (byte,) = memory.read(1)
                    memory.seek(start + size - 5)
                    memory.write(bytes([byte ^ 1]))
                return
    raise AssertionError("no keeper holds it")


def main() -> None:
    """Trains to the end, unless it is killed."""
    folder, layout, *numbers = sys.argv[1:7]
    disk_step, kill_step, num_steps, num_kills = map(int, numbers)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world = paceline.start(device="cpu", threads_per_rank=1, seed=1)
    trainer = build_trainer(layout, asynchronous_saves=False)
    trainer.loader(_samples(), global_batch_size=8, name="train")
    first = trainer.resume(folder)
    if world.is_main:
        print(f"from {first}", flush=True)
    for number in steps(trainer, num_steps - first):
        trainer.save(wait=True) if number == disk_step else trainer.save_to_memory()
        if number == kill_step and attempt < num_kills:
            memory = trainer._saver.saving.memory
            memory._finish()
            while memory._num_behind:
                assert memory._keeper is not None
                assert memory._keeper.read_kept(None) == ""
                memory._num_behind -= 1
            dist.barrier()
            if "flip" in sys.argv[7:] and world.is_main:
                flip_newest(Path(folder), number)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    found = describe(trainer)
    if world.is_main:
        print(f"hash {found}", flush=True)
    torch.distributed.barrier()
    trainer.close()
    world.close()


def _samples() -> object:
    from tests.train.test_saving import Samples

    return Samples()


if __name__ == "__main__":
    main()
