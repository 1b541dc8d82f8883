import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def accumulate(model, loss):
    with model.no_sync():
        loss.backward()  # PL075


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    opt.zero_grad()
    accumulate(model, model(torch.randn(8, 4)).mean() / 2)
    (model(torch.randn(8, 4)).mean() / 2).backward()
    opt.step()
