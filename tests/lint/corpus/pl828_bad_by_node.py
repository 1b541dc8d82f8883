import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import os

dist.init_process_group("gloo")
size = {0: 64, 1: 16}[int(os.environ["GROUP_RANK"])]
data = TensorDataset(torch.randn(1000, 8), torch.randint(0, 3, (1000,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, size, sampler=sampler)  # PL828
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
