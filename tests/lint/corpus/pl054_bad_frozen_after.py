import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
for p in model.module[0].parameters():
    p.requires_grad = False  # PL054
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
