import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
if dist.get_rank() < 8:
    mesh = init_device_mesh("cuda", (8,))  # PL006
    print(mesh)
