import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
world = dist.get_world_size()
per_node = 8
my_group = None
for node in range(world // per_node):
    ranks = list(range(node * per_node, (node + 1) * per_node))
    group = dist.new_group(ranks)
    if rank in ranks:
        my_group = group
x = torch.zeros(4)
dist.broadcast(x, src=0, group=my_group)  # PL010
