import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
norm = torch.ones(1)
if mesh["tp"].get_local_rank() == 0:
    dist.all_reduce(norm, group=mesh["tp"].get_group())  # PL001
