import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(dataset)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(dataset, batch_size=10, sampler=sampler):
        print(x.mean())
