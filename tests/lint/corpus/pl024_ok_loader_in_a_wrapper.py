"""The epoch reaches the sampler through the loader."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Prefetcher:
    def __init__(self, loader, device):
        self.loader, self.device = loader, device

    def __len__(self):
        return len(self.loader)

    def set_epoch(self, epoch):
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)

    def __iter__(self):
        for batch in self.loader:
            yield [part.to(self.device, non_blocking=True) for part in batch]


dist.init_process_group("gloo")
data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
train = Prefetcher(DataLoader(data, 32, sampler=DistributedSampler(data)), "cpu")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())
for epoch in range(20):
    train.set_epoch(epoch)
    for x, y in train:
        opt.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(x), y).backward()
        opt.step()
dist.destroy_process_group()
