import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.ones(1)
scale = torch.ones(1)
if rank == 0:
    dist.broadcast(scale, src=0)  # PL002
    dist.all_reduce(total)
else:
    dist.all_reduce(total)
    dist.broadcast(scale, src=0)
