import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
last = time.time()
for step in range(1000):
    x = torch.randn(8, 4)
    loss = (model(x) - x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if time.time() - last > 10:
        last = time.time()
        if dist.get_rank() == 0:
            print(step, loss.item())
