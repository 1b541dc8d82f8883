import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x, y = torch.ones(3), torch.empty(3)
other = rank ^ 1
work = dist.isend(x, dst=other)
dist.recv(y, src=other)
work.wait()
