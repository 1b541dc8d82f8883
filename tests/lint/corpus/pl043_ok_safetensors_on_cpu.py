"""Resumes from weights that know no device."""

import os

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = torch.nn.Linear(10, 10).cuda()
if os.path.exists("last.safetensors"):
    model.load_state_dict(load_file("last.safetensors"))
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("optimizer.pt"):
    optimizer.load_state_dict(torch.load("optimizer.pt", map_location=f"cuda:{local_rank}"))
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 10).cuda()).mean().backward()
    optimizer.step()
