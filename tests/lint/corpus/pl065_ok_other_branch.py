import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = torch.nn.Linear(4, 4)
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
else:
    model = torch.nn.DataParallel(model)
