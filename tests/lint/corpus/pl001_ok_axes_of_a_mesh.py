import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
norm = torch.ones(1)
dist.all_reduce(norm, group=mesh.get_group("tp"))
parts = [torch.empty(1) for _ in range(2)]
dist.all_gather(parts, norm, group=mesh.get_group("dp"))
if mesh.get_local_rank("tp") == 0:
    dist.all_reduce(norm, group=mesh.get_group("dp"))
if dist.get_rank() == 0:
    print(norm)
