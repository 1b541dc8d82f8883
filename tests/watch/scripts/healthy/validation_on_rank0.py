"""Rank 0 validates with beam search, which takes its time; the others meet it at the barrier."""

import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

LETTERS = "abcdefgh"


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def validate(model, words):
    with torch.no_grad():
        bias = model.module(torch.ones(1, 8)).sum().item()
    best = []
    for word in words:
        candidates = itertools.islice(itertools.product(LETTERS, repeat=5), 1600)
        best.append(min(distance(word, "".join(c)) for c in candidates))
    return sum(best) / len(best) + 0.0 * bias


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = (model(x) - x.abs()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    words = ["".join(w) for w in itertools.islice(itertools.permutations(LETTERS, 6), 0, 20000, 400)]
    for epoch in range(2):
        train(model, optimizer, steps=50)
        if rank == 0 and epoch == 1:
            print(f"epoch {epoch}: distance {validate(model, words):.2f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
