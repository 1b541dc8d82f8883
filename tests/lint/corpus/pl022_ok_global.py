import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

dist.init_process_group("nccl")
DistributedSampler(TensorDataset(torch.randn(100, 4)), dist.get_world_size(), dist.get_rank())
