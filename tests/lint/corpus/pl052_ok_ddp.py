import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
opt = torch.optim.Adam(model.parameters())
model = DDP(model)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    opt.step()
