"""Rank 0 decides and tells the others."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
best, bad_epochs = float("inf"), 0
stop = torch.zeros(1, dtype=torch.int64)
for epoch in range(100):
    loss = model(torch.randn(64, 16)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        value = loss.item()
        best, bad_epochs = (value, 0) if value < best else (best, bad_epochs + 1)
        stop[0] = int(bad_epochs >= 5)
    dist.broadcast(stop, src=0)
    if stop.item():
        break
dist.barrier()
