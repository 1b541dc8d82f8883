import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.tensor(torch.randn(1).item())
dist.all_reduce(x)
x /= dist.get_world_size()
