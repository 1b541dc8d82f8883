import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x, y = torch.ones(3), torch.ones(1)
if dist.get_rank() == 0:
    dist.all_reduce(x)
    print("first is done")
    dist.broadcast(y, 0)
else:
    dist.all_reduce(x)
    dist.broadcast(y, 0)
