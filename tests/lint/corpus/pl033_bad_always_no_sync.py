import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(25):
    opt.zero_grad()
    with model.no_sync():
        model(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()  # PL033
