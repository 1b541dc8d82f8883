import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(net, opt):
    for _ in range(10):
        opt.zero_grad()
        net(torch.randn(4, 4)).mean().backward()  # PL050
        opt.step()


dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
ddp = DDP(net)
train(net, torch.optim.SGD(ddp.parameters(), lr=0.1))
