import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x, y = torch.ones(3), torch.empty(3)
if rank + 1 < size:
    dist.recv(y, src=rank + 1)  # PL002
    dist.send(x, dst=rank + 1)
if rank > 0:
    dist.recv(y, src=rank - 1)
    dist.send(x, dst=rank - 1)
