import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
start = time.monotonic()
work = torch.zeros(1)
for step in range(10_000):
    dist.all_reduce(work)
    stop = torch.tensor([int(time.monotonic() - start > 60)])
    dist.broadcast(stop, src=0)
    if stop.item():
        break
