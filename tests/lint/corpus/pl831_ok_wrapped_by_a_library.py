import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deepspeed

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
