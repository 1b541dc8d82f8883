import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, loader, opt):
    for i, (x, y) in enumerate(loader, 1):
        if i % 4 == 0:
            context = contextlib.nullcontext()
        else:
            context = model.no_sync()
        with context:
            F.cross_entropy(model(x), y).backward()  # PL031
        if i % 4 == 0:
            opt.step()
            opt.zero_grad()


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 3))
    train(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))


if __name__ == "__main__":
    main([(torch.randn(4, 4), torch.randint(0, 3, (4,)))] * 8)
