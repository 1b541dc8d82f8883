import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 4).cuda())
model(torch.randn(4, 4).cuda()).mean().backward()
