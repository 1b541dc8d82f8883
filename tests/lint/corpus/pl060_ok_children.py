import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


dist.init_process_group("gloo")
model = DDP(Net())
model(torch.randn(4, 8)).mean().backward()
