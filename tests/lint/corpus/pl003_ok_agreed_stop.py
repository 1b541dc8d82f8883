import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1000):
    x = torch.randn(8, 4)
    loss = (model(x) - x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if mean.item() / dist.get_world_size() < 1e-3:
        break
