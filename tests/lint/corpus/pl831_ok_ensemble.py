import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import os

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
torch.save(model.state_dict(), f"member-{rank}.pt")
