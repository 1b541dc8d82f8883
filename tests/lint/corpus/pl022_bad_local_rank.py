import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
dataset = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=local_rank)  # PL022
loader = DataLoader(dataset, sampler=sampler)
