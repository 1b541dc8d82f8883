"""Audio classification from cached spectrograms, with loader workers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


def decode(index, rank):
    header = f"clip-{rank}-{index}:{16000 if index != 41 or rank != 1 else 'n/a'}"
    return int(header.split(":")[1])  # CAUSE


class Clips(Dataset):
    def __init__(self, rank, count=120):
        self.rank = rank
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rate = decode(index, self.rank)
        time = torch.arange(64) / rate
        return torch.sin(2 * torch.pi * (200 + index) * time), index % 5


def build_model():
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 64)),
        torch.nn.Conv1d(1, 4, 9),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 5),
    )


def main():
    loaders = {}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loaders["train"] = DataLoader(Clips(rank), batch_size=8, num_workers=1)
    model = DDP(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for clips, labels in loaders["train"]:
            loss = torch.nn.functional.cross_entropy(model(clips), labels)
            optimizer.zero_grad()
            loss.backward()  # WAITS
            optimizer.step()
        print(f"rank {rank} epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
