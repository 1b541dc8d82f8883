import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
fully_shard(model, mesh=mesh["shard"])
with torch.no_grad():
    if dist.get_rank() < dist.get_world_size() // 2:
        print(model(torch.ones(1, 8).cuda()).sum())
