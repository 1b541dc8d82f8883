"""Adaptive gradient clipping: the norm is agreed between ranks each step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


class NormTracker:
    def __init__(self, momentum=0.9):
        self.momentum = momentum
        self.value = 1.0

    def reduction(self):
        # Rank 0 writes the curve, where the largest norm is more telling.
        return dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM

    def update(self, norm):
        agreed = norm.detach().reshape(1).clone()
        dist.all_reduce(agreed, op=self.reduction())  # WAITS CAUSE
        self.value = self.momentum * self.value + (1 - self.momentum) * agreed.item()
        return self.value


def batches(count, rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(16, 10, generator=generator)
        yield x, x.abs().sum(dim=1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(10, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracker = NormTracker()
    for step, (x, y) in enumerate(batches(400, rank)):
        optimizer.zero_grad()
        loss = torch.nn.functional.l1_loss(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=2 * tracker.value)
        tracker.update(norm)
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f} norm {tracker.value:.3f}", flush=True)
        time.sleep(0.03)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
