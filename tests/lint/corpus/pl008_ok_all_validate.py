import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
model.eval()
with torch.no_grad():
    score = model(torch.randn(2, 4)).mean()
if dist.get_rank() == 0:
    print(score.item())
