import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32 if rank == 0 else 16, sampler=sampler)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") * world / count
        loss.backward()
        optimizer.step()
