import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = 2


dist.init_process_group("gloo")
model = DistributedDataParallel(Net())
model.scale = model.module.scale
print(model.scale, model.device_ids)
