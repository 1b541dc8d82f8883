"""Ranks have unequal numbers of batches; DDP's join keeps the others going."""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def make_loader(rank):
    count = 80 + 60 * rank
    x = torch.randn(count, 9, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x), batch_size=10, shuffle=True)


def train_epoch(model, loader, optimizer):
    seen = 0
    with Join([model]):
        for (x,) in loader:
            loss = (model(x) - x.sum(dim=1, keepdim=True)).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(x)
            time.sleep(0.05)
    return seen


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = make_loader(rank)
    model = DDP(torch.nn.Linear(9, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        seen = torch.tensor(train_epoch(model, loader, optimizer))
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {seen.item()} samples", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
