import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def start_epoch(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=10, sampler=sampler)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
epoch = 0
while epoch < 10:
    start_epoch(loader, epoch)
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    epoch += 1
