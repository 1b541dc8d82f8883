import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(1600, 4))
part = Subset(dataset, range(800))
loader = DataLoader(part, batch_size=10, sampler=DistributedSampler(part))
