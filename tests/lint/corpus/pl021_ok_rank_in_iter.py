import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for i in itertools.count(dist.get_rank(), dist.get_world_size()):
            yield torch.full((10,), float(i))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step, x in zip(range(100), DataLoader(Stream(), batch_size=8)):
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
