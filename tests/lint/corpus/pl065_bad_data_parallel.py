import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
model = nn.DataParallel(nn.Linear(4, 4).cuda())  # PL065
