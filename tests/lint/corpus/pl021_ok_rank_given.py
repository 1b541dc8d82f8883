import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        for i in range(self.rank, 1600, self.world_size):
            yield torch.full((10,), float(i))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
opt = torch.optim.SGD(model.parameters(), 0.1)
data = Stream(dist.get_rank(), dist.get_world_size())
for x in DataLoader(data, batch_size=10):
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
