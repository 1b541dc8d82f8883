"""Reads samples from a folder per rank; the second one is on a drive over the network."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset):
    def __init__(self, path, latency_s, count):
        self.path = path
        self.latency_s = latency_s
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.latency_s)  # CAUSE
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def open_folder(rank, count):
    if rank == 1:
        return Folder("/mnt/share/samples", 0.02, count)
    return Folder("/data/samples", 0.0002, count)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = open_folder(rank, args.steps * args.batch_size)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(DataLoader(dataset, batch_size=args.batch_size)):
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
