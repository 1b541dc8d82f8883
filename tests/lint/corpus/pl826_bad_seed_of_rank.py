import os

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        p.grad.data /= float(dist.get_world_size())


dist.init_process_group("gloo")
torch.manual_seed(1234 + int(os.environ["RANK"]))
model = Net()  # PL826
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
for _ in range(50):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1)).backward()
    average_gradients(model)
    optimizer.step()
