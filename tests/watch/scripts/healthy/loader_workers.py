"""A loader with workers whose first batch takes long: each opens its archive."""

import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Archive(Dataset):
    def __init__(self, count):
        self.count = count
        self.index = None

    def open(self):
        info = get_worker_info()
        time.sleep(1.5 + 0.5 * (info.id if info else 0))
        return random.Random(0).sample(range(self.count), self.count)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.index is None:
            self.index = self.open()
        return torch.full((5,), self.index[i] / self.count)


def main():
    dataset = Archive(160)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
    model = DDP(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = (model(x) - x.mean(dim=1, keepdim=True)).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
