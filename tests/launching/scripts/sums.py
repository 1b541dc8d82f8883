"""Sums over all ranks and tells the place: `sums.py [STEPS [SECONDS]]`, with FAIL=rank to raise there.

With UNTIL="21" it goes on for ever, but where 2 ranks were followed by 1.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2
timeout_s = int(sys.argv[2]) if len(sys.argv) > 2 else 30
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
rank, size = dist.get_rank(), dist.get_world_size()
if "UNTIL" in os.environ:
    with open("sizes", "a+") as file:
        file.write(str(size))
        file.seek(0)
        if not file.read().endswith(os.environ["UNTIL"]):
            steps = sys.maxsize
for step in range(steps):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    if total.item() != size * (size + 1) / 2:
        raise ValueError(f"rank {rank} has {total.item()}")
    if step == 1:
        print(f"runs as {rank} of {size}", flush=True)
    if os.environ.get("FAIL") == str(rank) and step == 1:
        raise ValueError(f"rank {rank} fails on purpose")
    if steps > 2:
        time.sleep(0.05)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME")
place = " ".join(os.environ.get(name, "-") for name in names)
print(f"sum {total.item():.0f} on {rank} of {size}, {place}", flush=True)
dist.destroy_process_group()
