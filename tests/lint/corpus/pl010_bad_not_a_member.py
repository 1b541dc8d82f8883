import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
upper = dist.new_group(list(range(8, 16)))
x = torch.ones(3)
if rank >= 8:
    dist.broadcast(x, src=0, group=upper)  # PL010
