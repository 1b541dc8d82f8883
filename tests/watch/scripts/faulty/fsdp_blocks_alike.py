"""One rank skips a block that is like all others: the sizes of what is gathered agree."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for n in range(4))

    def forward(self, x, skipped):
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)  # WAITS CAUSE
        return x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(400):
        skipped = 2 if rank == 1 and step >= 3 else None
        model(torch.randn(4, 8), skipped).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
