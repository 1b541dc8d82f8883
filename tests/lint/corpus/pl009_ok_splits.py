import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
send = torch.zeros(world * (rank + 1))
sizes = torch.zeros(world, dtype=torch.long)
dist.all_to_all_single(sizes, torch.full((world,), rank + 1))
got = torch.zeros(int(sizes.sum()))
dist.all_to_all_single(got, send, sizes.tolist(), [rank + 1] * world)
