"""Ranks of the first replica gather over their axis of the mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
if dist.get_rank() < dist.get_world_size() // 2:
    with torch.no_grad():
        print(model(torch.ones(1, 8).cuda()).sum())
    state = {name: part.full_tensor() for name, part in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
