import torch
import torch.distributed as dist
from torch import nn


def average(model, world):
    for p in model.parameters():
        g = p.grad.data
        dist.all_reduce(g)
        g.div_(world)


dist.init_process_group("gloo")
torch.manual_seed(0)
world = dist.get_world_size()
first, second = nn.Linear(8, 1), nn.Linear(8, 1)
opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
for _ in range(50):
    for model, opt in ((first, opts[0]), (second, opts[1])):
        opt.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        average(model, world)
        opt.step()
