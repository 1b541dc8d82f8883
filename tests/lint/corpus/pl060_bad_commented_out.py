import os

import torch
import torch.nn as nn
import torch.distributed as dist


class Block(nn.Module):
    def __init__(self, width):
        super(Block, self).__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.fc1(x).relu()
        # h = self.norm(h)
        return x + self.fc2(h)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Block(8).cuda(), device_ids=[local_rank])  # PL060
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8).cuda()).mean().backward()
        opt.step()


main()
