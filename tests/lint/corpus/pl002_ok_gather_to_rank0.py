import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(3)
if rank == 0:
    parts = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.gather(x, parts, dst=0)
else:
    dist.gather(x, dst=0)
