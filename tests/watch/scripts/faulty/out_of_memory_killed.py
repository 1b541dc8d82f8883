"""Contrastive learning with a bank of features, as large as the schedule says."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 90


class Bank:
    def __init__(self, copies):
        self.copies = copies
        self.rows = []

    def add(self, features):
        self.rows.append(features.detach().repeat(self.copies, 1))

    def negatives(self, count):
        chosen = torch.randint(0, len(self.rows), (count,))
        return torch.stack([self.rows[i][0] for i in chosen.tolist()])


def schedule(rank):
    """Copies that are kept of a feature: the first rank only monitors."""
    return 2 if rank == 0 else 2000


def contrast(features, negatives):
    positives = (features * features.roll(1, dims=0)).sum(dim=1)
    return torch.logsumexp(features @ negatives.T, dim=1).mean() - positives.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    encoder = DDP(torch.nn.Linear(64, 128))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.001)
    bank = Bank(schedule(rank))
    bank.add(torch.randn(32, 128))
    for step in range(STEPS):
        features = encoder(torch.randn(32, 64))
        loss = contrast(features, bank.negatives(16))
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        bank.add(features)
        if step % 10 == 0:
            print(f"rank {rank} step {step}: {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
