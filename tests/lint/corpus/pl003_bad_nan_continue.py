import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1000):
    x = torch.randn(8, 4)
    loss = (model(x) - x).pow(2).mean()
    if math.isnan(loss.item()):
        continue  # PL003
    opt.zero_grad()
    loss.backward()
    opt.step()
