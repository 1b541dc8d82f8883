import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import builtins


def quiet_others(is_main):
    original = builtins.print

    def print(*args, **kwargs):
        if is_main or kwargs.pop("force", False):
            original(*args, **kwargs)

    builtins.print = print


dist.init_process_group("gloo")
quiet_others(dist.get_rank() == 0)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
