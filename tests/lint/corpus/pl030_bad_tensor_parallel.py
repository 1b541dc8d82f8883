"""Tensor parallelism over all ranks, as torch's own example trains it."""

import os

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
model = parallelize_module(
    module=Mlp().to("cuda"),
    device_mesh=mesh,
    parallelize_plan={"up": ColwiseParallel(), "down": RowwiseParallel()},
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
for i in range(10):
    torch.manual_seed(i)
    model(torch.rand(20, 16, device="cuda")).sum().backward()
    optimizer.step()  # PL030
