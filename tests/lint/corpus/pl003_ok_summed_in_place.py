import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sums = {"time": torch.zeros(1)}
while True:
    total = sums["time"]
    total += time.monotonic()
    dist.all_reduce(sums["time"])
    if total.item() > 100:
        break
