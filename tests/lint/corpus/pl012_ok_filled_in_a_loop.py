import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3)
parts = []
for _ in range(dist.get_world_size()):
    parts.append(torch.empty_like(x))
dist.all_gather(parts, x)
