import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sys

dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    if not torch.isfinite(loss):
        print("loss is", loss.item(), file=sys.stderr)
        sys.exit(1)
    loss.backward()
    optimizer.step()
print("this rank has finished")
