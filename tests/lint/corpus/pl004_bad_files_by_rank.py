import glob

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
files = sorted(glob.glob("shards/*.pt"))[rank::world_size]
model = DDP(torch.nn.Linear(10, 10).cuda(rank % 8), device_ids=[rank % 8])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for name in files:  # PL004
    x = torch.load(name, map_location="cpu").cuda(rank % 8)
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
