import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1)
for i in range(10 + rank):  # PL004
    dist.all_reduce(x)
