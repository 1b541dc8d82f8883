import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
train = TensorDataset(torch.randn(100, 4))
valid = TensorDataset(torch.randn(50, 4))
sampler = DistributedSampler(train)
train_loader = DataLoader(train, batch_size=10, sampler=sampler)
valid_loader = DataLoader(valid, batch_size=10, shuffle=False)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in train_loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    with torch.no_grad():
        for (x,) in valid_loader:
            print(model.module(x).mean())  # PL060
