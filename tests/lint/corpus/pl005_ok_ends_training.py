import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(100):
        x = torch.randn(8, 4)
        opt.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        opt.step()
except KeyboardInterrupt:
    print("stopped by hand")
    sys.exit(1)
