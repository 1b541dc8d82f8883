"""A loader's worker waits for a producer that has nothing left."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Produced(Dataset):
    def __init__(self, rank):
        self.rank = rank
        self.queue = torch.multiprocessing.Queue()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.rank == 0 and index > 20:
            self.queue.get()
        return torch.ones(3)


def main():
    dist.init_process_group("gloo")
    samples = Produced(dist.get_rank())
    for batch in DataLoader(samples, batch_size=4, num_workers=1, persistent_workers=True):  # CAUSE
        dist.all_reduce(batch)  # WAITS
    dist.destroy_process_group()


main()
