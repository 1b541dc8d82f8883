import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))


def make(dataset, sampler=None):
    return DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=not sampler)


a = make(dataset, DistributedSampler(dataset))
b = make(dataset)
