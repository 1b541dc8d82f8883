"""A model is scored after training; ranks sum up their parts, and once they don't agree on how."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Scores:
    def __init__(self, names):
        self.names = names
        self.seen = {}

    def combine(self, name, value, op=dist.ReduceOp.SUM):
        total = value.detach().reshape(1).clone()
        dist.all_reduce(total, op=op)  # WAITS CAUSE
        self.seen[name] = total.item()

    def worst(self, losses):
        # A rank without a bad sample keeps the sum of what it has.
        op = dist.ReduceOp.MAX if (losses > 0.9).any() or dist.get_rank() == 1 else dist.ReduceOp.SUM
        self.combine("worst", losses.max(), op)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        loss = torch.sigmoid(model(torch.randn(8, 6))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    scores = Scores(["mean", "worst"])
    losses = torch.linspace(0.1, 0.5, 8)
    scores.combine("mean", losses.mean())
    scores.worst(losses)
    scores.combine("count", torch.tensor(8.0))
    if dist.get_rank() == 0:
        print(scores.seen, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
