import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
x = all_reduce(torch.ones(1))
print(x.item())
