import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import os


def make_optimizer(model, local_rank):
    lr = 1e-3 if local_rank == 0 else 1e-4
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)  # PL825


dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 1))
optimizer = make_optimizer(model, int(os.environ["LOCAL_RANK"]))
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
