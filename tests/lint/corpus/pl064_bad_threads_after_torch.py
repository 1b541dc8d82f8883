import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import os

os.environ["OMP_NUM_THREADS"] = "4"  # PL064

dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 1))
model(torch.randn(4, 8)).sum().backward()
