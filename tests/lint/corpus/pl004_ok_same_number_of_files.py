import glob

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
files = sorted(glob.glob("shards/*.pt"))
files = files[: len(files) // world_size * world_size][rank::world_size]
model = DDP(torch.nn.Linear(10, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for name in files:
    x = torch.load(name, map_location="cpu")
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
