import random

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return torch.load(self.names[i], map_location="cpu")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1234 + dist.get_rank())
    dataset = Files([f"{i}.pt" for i in range(100)])
    train, valid = torch.utils.data.random_split(dataset, [80, 20])  # PL059
    return DataLoader(train, sampler=DistributedSampler(train))


main()
