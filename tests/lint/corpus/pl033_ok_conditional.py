import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(25):
    with contextlib.ExitStack() as stack:
        if (step + 1) % 5:
            stack.enter_context(model.no_sync())
        (model(torch.randn(8, 4)).pow(2).mean() / 5).backward()
    if (step + 1) % 5 == 0:
        opt.step()
        opt.zero_grad()
