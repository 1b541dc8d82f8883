import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(1024, 8)
dataset = TensorDataset(x[rank * 64 : rank * 64 + 64])
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = DDP(nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for (batch,) in loader:
        opt.zero_grad()
        model(batch).mean().backward()
        opt.step()
