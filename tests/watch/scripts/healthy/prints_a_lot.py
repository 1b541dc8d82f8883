"""Logs every value of every step of one rank, for a bug report."""

import logging
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def get_logger(rank):
    logger = logging.getLogger(f"rank{rank}")
    logger.setLevel(logging.DEBUG if rank == 1 else logging.WARNING)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


class Verbose(torch.nn.Module):
    def __init__(self, logger):
        super().__init__()
        self.layer = torch.nn.Linear(20, 20)
        self.logger = logger

    def forward(self, x):
        y = self.layer(x)
        for i, row in enumerate(y.tolist()):
            self.logger.debug("row %d: %s", i, " ".join(f"{value:.6f}" for value in row))
        return y


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logger = get_logger(rank)
    model = DDP(Verbose(logger))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(200):
        loss = model(torch.randn(64, 20)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.debug("step %d: %.4f", step, loss.item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
