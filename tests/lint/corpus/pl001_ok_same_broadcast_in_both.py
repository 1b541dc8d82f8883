import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    weights = torch.randn(10)
    dist.broadcast(weights, src=0)
else:
    weights = torch.empty(10)
    dist.broadcast(weights, src=0)
print(weights.sum())
