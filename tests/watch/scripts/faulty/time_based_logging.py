"""Logs about once per second, whatever the speed."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Ticker:
    """True about every `interval_s` seconds."""

    def __init__(self, interval_s):
        self.interval_s = interval_s
        self.last = time.monotonic()

    def ready(self):
        now = time.monotonic()
        if now - self.last < self.interval_s:
            return False
        self.last = now
        return True


def mean_over_ranks(values):
    tensor = torch.stack(values).mean()
    everyone = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)  # WAITS
    return torch.stack(everyone).mean().item()


def warm_up(rank):
    """Reads the first files; ranks take unlike long."""
    time.sleep(0.1 * rank)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    warm_up(rank)
    ticker = Ticker(interval_s=1.0)
    losses = []
    for step in range(2000):
        x = torch.randn(8, 10)
        loss = (model(x) - x[:, :2]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # CAUSE
        optimizer.step()
        losses.append(loss.detach())
        if ticker.ready():
            mean = mean_over_ranks(losses)
            losses.clear()
            if rank == 0:
                print(f"step {step}: {mean:.4f}", flush=True)
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
