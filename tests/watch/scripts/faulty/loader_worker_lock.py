"""A lock is held in the process that forks the loader's worker; the worker waits for it for ever."""

import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

CACHE = threading.Lock()


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        with CACHE:
            return torch.full((4,), float(index))


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        CACHE.acquire()
    for batch in DataLoader(Samples(), batch_size=4, num_workers=1):  # CAUSE
        dist.all_reduce(batch)  # WAITS
    dist.destroy_process_group()


main()
