import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(dataset) if dist.get_world_size() > 1 else None
loader = DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=(sampler is None))
