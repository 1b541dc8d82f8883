import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, warm):
        x = self.first(x)
        if self.rank > 0 or warm:
            x = self.second(x)  # PL008
        return x


dist.init_process_group("gloo")
model = Net(dist.get_rank())
fully_shard(model.first)
fully_shard(model.second)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(2, 4), step > 3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
