import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.ones(3)
if rank + 1 < size:
    dist.recv(x, src=rank + 1)
if rank > 0:
    dist.send(x + 1, dst=rank - 1)
