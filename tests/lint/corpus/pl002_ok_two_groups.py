import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
even = dist.new_group(list(range(0, 16, 2)))
odd = dist.new_group(list(range(1, 16, 2)))
x = torch.ones(1)
if rank % 2 == 0:
    dist.broadcast(x, src=0, group=even)
    dist.all_reduce(x, group=even)
else:
    dist.all_reduce(x, group=odd)
    dist.broadcast(x, src=1, group=odd)
