import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
node = dist.get_rank() // size
dataset = TensorDataset(torch.load(f"node{node}.pt", map_location="cpu"))
loader = DataLoader(
    dataset, batch_size=10, sampler=DistributedSampler(dataset, num_replicas=size, rank=local)
)
