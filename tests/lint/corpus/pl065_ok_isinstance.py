import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
plain = model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model
