import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((10,), float(rank))
dist.all_reduce(x, op=dist.ReduceOp.MAX)
y = torch.tensor([rank])
dist.all_reduce(y)
