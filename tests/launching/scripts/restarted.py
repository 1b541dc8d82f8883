"""Dies by itself in the first rounds: `restarted.py RANK HOW,HOW [TIMEOUT]` with HOW raise, kill or exit."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, how = int(sys.argv[1]), sys.argv[2].split(",")
timeout_s = int(sys.argv[3]) if len(sys.argv) > 3 else 30
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
size = dist.get_world_size()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
assert total.item() == size * (size + 1) / 2
# One that has come back may count from 0 again, so the round is told by a file.
if dist.get_rank() == rank:
    with open("deaths", "a+") as file:
        file.seek(0)
        deaths = len(file.read().split())
        if deaths < len(how):
            file.write(f"{how[deaths]} ")
    if deaths < len(how):
        print(f"round {number}: rank {rank} dies by {how[deaths]}", flush=True)
        if how[deaths] == "raise":
            raise ValueError("died on purpose")
        if how[deaths] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
dist.all_reduce(total)
dist.barrier()
print(f"rank {dist.get_rank()} of {size} came through with {total.item():.0f}", flush=True)
dist.destroy_process_group()
