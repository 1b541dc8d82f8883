"""Trains on CSV shards, one set of files per rank."""

import csv
import io
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

ROWS_PER_FILE = 40
FILES = [f"part-{i:02d}.csv" for i in range(7)]


def read_file(name):
    rng = random.Random(name)
    rows = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(ROWS_PER_FILE)]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    text.seek(0)
    return [[float(cell) for cell in row] for row in csv.reader(text)]


class Rows(Dataset):
    def __init__(self, files):
        self.rows = [row for name in files for row in read_file(name)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = torch.tensor(self.rows[index])
        return row[:4], row[4:]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Rows(FILES[rank::world_size]), batch_size=10, shuffle=True)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(4):
        total = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # WAITS
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.barrier()  # CAUSE
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
