import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(model.module(torch.randn(2, 4)))
