"""One rank's shards come from a slow drive: some seconds at the start of each epoch."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):
    def __init__(self, rank, delay_s):
        self.rank = rank
        self.delay_s = delay_s

    def open(self):
        time.sleep(self.delay_s)
        return torch.Generator().manual_seed(self.rank)

    def __iter__(self):
        generator = self.open()
        for _ in range(160):
            yield torch.randn(10, generator=generator)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shards = Shards(rank, delay_s=3.0 if rank == 1 else 0.0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.ReLU(), torch.nn.Linear(5, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        total = torch.zeros(1)
        for x in DataLoader(shards, batch_size=8):
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / 20 / dist.get_world_size():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
