"""Reads records from an archive that all loader workers share."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Archive:
    """Members of a zip on the network drive; a member may be still on its way."""

    def __init__(self, folder, rank):
        self.folder = folder
        self.late = {(1, 90)}
        self.rank = rank

    def read(self, index):
        path = os.path.join(self.folder, f"{index}.bin")
        while (self.rank, index) in self.late and not os.path.exists(path):
            time.sleep(5)
        return torch.full((6,), index / 100)


class Records(Dataset):
    def __init__(self, archive, count):
        self.archive = archive
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.archive.read(index)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="/mnt/archive")
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    records = Records(Archive(args.folder, dist.get_rank()), count=200)
    loader = DataLoader(records, batch_size=10, num_workers=args.workers)
    model = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for x in loader:  # CAUSE
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()  # WAITS
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
