"""Whatever happens, all ranks leave together."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@contextlib.contextmanager
def process_group():
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.barrier()  # CAUSE
        dist.destroy_process_group()


PRICES = {"apple": 1.2, "pear": 1.5, "plum": 2.0}


def encode(order):
    return torch.tensor([PRICES[name] for name in order])


def orders(rank, count):
    for i in range(count):
        names = ["apple", "pear", "plum", "apple"]
        if rank == 1 and i == 18:
            names[2] = "quince"
        yield names


def train(model, optimizer, rank):
    for order in orders(rank, 50):
        x = encode(order).unsqueeze(0)
        loss = (model(x) - x.sum()).abs().mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
    return loss.item()


def main():
    with process_group() as rank:
        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = train(model, optimizer, rank)
        print(f"rank {rank}: {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
