import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", rank=0, world_size=4)  # PL014
model = DDP(torch.nn.Linear(4, 4))
model(torch.randn(2, 4)).sum().backward()
