import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
for p in net[0].parameters():
    p.requires_grad = False
model = DDP(net)
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
