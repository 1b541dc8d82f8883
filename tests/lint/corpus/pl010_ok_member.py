import torch
import torch.distributed as dist

dist.init_process_group("gloo")
upper = dist.new_group(list(range(8, 16)))
x = torch.ones(3)
if dist.get_rank() >= 8:
    dist.broadcast(x, src=8, group=upper)
