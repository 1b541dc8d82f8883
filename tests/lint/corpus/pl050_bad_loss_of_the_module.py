import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 2)
        self.decode = nn.Linear(2, 8)

    def forward(self, x):
        return self.decode(self.encode(x))

    def loss(self, x):
        return (self.decode(self.encode(x)) - x).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Autoencoder())
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100):
    loss = model.module.loss(torch.randn(16, 8))
    optimizer.zero_grad()
    loss.backward()  # PL050
    optimizer.step()
