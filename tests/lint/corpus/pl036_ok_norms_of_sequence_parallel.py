"""Ranks of tensor parallelism share one loss, so sums of their parts of a gradient are not divided."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
model = parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    for parameter in model[0].parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
