import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SHUFFLE = True


def make(dataset):
    sampler = DistributedSampler(dataset, shuffle=SHUFFLE)
    return DataLoader(dataset, 4, SHUFFLE, sampler)  # PL023


dist.init_process_group("gloo")
make(TensorDataset(torch.randn(100, 4)))
