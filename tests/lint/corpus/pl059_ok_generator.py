import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
train, valid = random_split(dataset, [80, 20], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train, batch_size=8, sampler=DistributedSampler(train))
