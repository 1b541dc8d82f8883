import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import time

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = []
for step in range(100):
    torch.cuda.synchronize()
    began = time.perf_counter()
    optimizer.zero_grad()
    model(torch.randn(4, 8).cuda()).pow(2).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
