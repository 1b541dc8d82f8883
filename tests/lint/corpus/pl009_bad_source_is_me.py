import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(3)
dist.broadcast(x, src=rank)  # PL009
