import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3)
for source in range(dist.get_world_size()):
    dist.broadcast(x, src=source)
