import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = dist.all_reduce(torch.ones(1))
print(total.item())  # PL072
