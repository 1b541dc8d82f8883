import torch.distributed as dist

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
mine = None
for first in range(0, world, 8):
    ranks = list(range(first, first + 8))
    group = dist.new_group(ranks)
    if rank in ranks:
        mine = group
dist.barrier(group=mine)
