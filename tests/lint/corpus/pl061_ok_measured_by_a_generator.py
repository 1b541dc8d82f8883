import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def timed(batches):
    times = []
    for batch in batches:
        began = time.time()
        yield batch
        times.append(time.time() - began)
    print(f"{sum(times) / len(times):.4f} s per batch")


dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in timed(torch.randn(100, 4, 8).cuda()):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
