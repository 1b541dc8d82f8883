import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as file:
            for line in file:
                yield torch.tensor([float(word) for word in line.split()])


dist.init_process_group("gloo")
loader = DataLoader(Lines("numbers.txt"), batch_size=8)  # PL021
model = DDP(torch.nn.Linear(10, 10))
opt = torch.optim.SGD(model.parameters(), 0.1)
for x in loader:
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
