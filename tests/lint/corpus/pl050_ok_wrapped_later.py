import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
net(torch.randn(4, 4)).mean().backward()
net.zero_grad()
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
