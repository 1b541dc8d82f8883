import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine, first = None, 0
for start in range(0, world, 8):
    group = dist.new_group(list(range(start, start + 8)))
    if start <= rank < start + 8:
        mine, first = group, start
x = torch.ones(3)
dist.broadcast(x, src=first, group=mine)
