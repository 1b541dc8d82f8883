import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return self.out(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(GPT(8))
print("width", model.module.width, model.training, next(model.parameters()).dtype)
