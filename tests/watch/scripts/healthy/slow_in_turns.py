"""Every rank is slow now and then: evaluation goes round."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class RoundRobin:
    def __init__(self, rank, size, every):
        self.rank, self.size, self.every = rank, size, every

    def is_on_duty(self, step):
        return step % self.every == 0 and (step // self.every) % self.size == self.rank


def evaluate(model, seconds):
    end = time.monotonic() + seconds
    count, total = 0, 0.0
    with torch.no_grad():
        while time.monotonic() < end:
            total += model.module(torch.randn(32, 6)).mean().item()
            count += 1
    return total / count


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    duty = RoundRobin(rank, size, every=20)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(200):
        x = torch.randn(8, 6)
        loss = (model(x) - x.amax(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if duty.is_on_duty(step):
            mean = evaluate(model, seconds=0.4)
            print(f"rank {rank} step {step}: mean {mean:.4f}", flush=True)
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
