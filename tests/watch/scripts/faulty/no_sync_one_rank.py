"""Gradient accumulation over batches until enough tokens have been seen."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

TOKENS_PER_STEP = 64


def read_batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    length = 8 if rank == 0 else 16
    for _ in range(count):
        yield torch.randint(0, 40, (2, length), generator=generator)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16)
        self.out = torch.nn.Linear(16, 40)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def train(model, optimizer, batches):
    tokens, updates = 0, 0
    for batch in batches:
        tokens += batch.numel()
        is_last = tokens >= TOKENS_PER_STEP
        with contextlib.nullcontext() if is_last else model.no_sync():
            logits = model(batch)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # WAITS
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            tokens, updates = 0, updates + 1
    return updates


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        updates = train(model, optimizer, read_batches(rank, 40))
        dist.barrier()  # CAUSE
        print(f"rank {rank} epoch {epoch}: {updates} updates", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
