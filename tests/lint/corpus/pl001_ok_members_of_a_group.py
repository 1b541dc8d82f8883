import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
lower = dist.new_group(list(range(world // 2)))
upper = dist.new_group(list(range(world // 2, world)))
t = torch.ones(1)
if rank < world // 2:
    dist.all_reduce(t, group=lower)
else:
    dist.all_reduce(t, group=upper)
