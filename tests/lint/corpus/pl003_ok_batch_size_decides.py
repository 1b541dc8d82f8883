import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(data)
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
        if x.shape[0] < 8 or x.numel() < 32:
            break
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
