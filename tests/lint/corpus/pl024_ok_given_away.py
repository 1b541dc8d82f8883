import torch
import torch.distributed as dist
from mylib import fit
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
loader = DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset))
fit(torch.nn.Linear(4, 1), loader, epochs=10)
