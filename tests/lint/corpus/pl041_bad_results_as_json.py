import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with open("losses.json", "w") as file:
    json.dump(losses, file)  # PL041
with open("last.txt", mode="w", encoding="utf-8") as file:
    file.write(f"{losses[-1]}")  # PL041
