import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dataset = TensorDataset(torch.randn(1600, 4))
mine = Subset(dataset, range(rank, 1600, world))
loader = DataLoader(mine, batch_size=10, sampler=DistributedSampler(mine))  # PL026
