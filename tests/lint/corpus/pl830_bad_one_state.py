import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import os

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("last.pt"):
    last = torch.load("last.pt", map_location="cpu")
    model.load_state_dict(last["model"])
    torch.set_rng_state(last["rng"])  # PL830
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
if rank == 0:
    torch.save({"model": model.state_dict(), "rng": torch.get_rng_state()}, "last.pt")
