"""Takes steps until FOLDER/end exists: `slow_node.py FOLDER`; each takes 0.2 s longer if SLOW_NODE is set.

Its state is the number of steps. After SIGTERM at any of them, all ranks take one last step, save and exit
with 75, as those of a trainer do.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))


def compute(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(range(1000))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
state = folder / "state"
step = int(state.read_text()) if state.exists() else 0
print(f"rank {rank} of {size} goes on from step {step}", flush=True)
while True:
    if "SLOW_NODE" in os.environ:
        compute(0.2)  # SLOW
    total = torch.tensor([float(len(asked)), float((folder / "end").exists())])
    dist.all_reduce(total)
    step += 1
    if total.any():
        if rank == 0:
            state.write_text(str(step))
        dist.barrier()
        break
    time.sleep(0.02)
dist.destroy_process_group()
sys.exit(75 if total[0] else 0)
