import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model = DDP(net)
model(torch.randn(4, 4)).mean().backward()
del model
net[0].requires_grad_(False)
model = DDP(net)
opt = torch.optim.SGD(net[1].parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
