"""One rank builds the cache of tokens, the others use it; a file lock keeps them apart."""

import contextlib
import fcntl
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

CACHE = Path("tokens.pt")


@contextlib.contextmanager
def locked(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # CAUSE
        yield
        fcntl.flock(file, fcntl.LOCK_UN)


def tokenize(count=200):
    return torch.tensor([[(i * j) % 31 for j in range(9)] for i in range(count)])


def load_tokens():
    with locked("tokens.lock"):
        if not CACHE.exists():
            torch.save(tokenize(), CACHE)
        dist.barrier()  # WAITS
        return torch.load(CACHE)


class Model(torch.nn.Module):
    def __init__(self, symbols=31, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(symbols, width)
        self.out = torch.nn.Linear(width, symbols)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = load_tokens()[rank::size]
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for row in tokens.split(10):
        loss = torch.nn.functional.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
