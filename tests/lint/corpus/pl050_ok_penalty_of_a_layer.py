import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100):
    x = torch.randn(16, 8)
    loss = (model(x) - x).square().mean() + model.module[0](x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
