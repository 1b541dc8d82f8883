import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def encode(self, x):
        return getattr(self, "body")(x)

    def forward(self, x):
        return self.head(self.encode(x))


dist.init_process_group("gloo")
model = DDP(Net())
model(torch.randn(4, 8)).mean().backward()
