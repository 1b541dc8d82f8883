import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 4).cuda())  # PL057
model(torch.randn(4, 4).cuda()).mean().backward()
