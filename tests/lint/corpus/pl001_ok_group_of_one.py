import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first = dist.new_group([0])
if rank == 0:
    t = torch.ones(1)
    dist.all_reduce(t, group=first)
dist.barrier()
