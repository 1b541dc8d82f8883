import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.aux = nn.Linear(8, 2)

    def forward(self, x):
        return self.body(x)


dist.init_process_group("gloo")
model = DDP(Net(), find_unused_parameters=True)
model(torch.randn(4, 8)).mean().backward()
