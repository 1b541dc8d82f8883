import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), shuffle=True)  # PL023
