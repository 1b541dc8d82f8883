"""A training loop in which rank 1 reads its samples from something slow.

paceline profile --nproc-per-node 2 examples/profile/slow_loader.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset[torch.Tensor]):
    """Random vectors; on rank 1 each takes 5 ms."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample."""
        if dist.get_rank() == 1:
            time.sleep(0.005)
        return torch.full((512,), index / 1024)


def main() -> None:
    """Train for 30 steps."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Numbers()
    batches = iter(DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset)))
    for _ in range(30):
        loss = model(next(batches)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
