"""Gradients are summed while the next layer's are still computed; waited for at the end."""

import time

import torch
import torch.distributed as dist
from torch import nn


class Overlap:
    def __init__(self, model):
        self.pending = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)
        self.pending.append((work, parameter))

    def finish(self):
        while self.pending:
            # Last in, first out: the one that was started last is often the smallest.
            work, parameter = self.pending.pop()
            work.wait()
            parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    overlap = Overlap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = torch.zeros(1)
    report = None
    for step in range(150):
        x = torch.randn(8, 12)
        loss = nn.functional.mse_loss(model(x), x[:, :2])
        optimizer.zero_grad()
        loss.backward()
        overlap.finish()
        optimizer.step()
        if step % 50 == 0:
            losses = loss.detach().clone()
            report = dist.all_reduce(losses, async_op=True)
            time.sleep(0.5 * rank)
        if step % 50 == 40 and report is not None:
            report.wait()
            if rank == 0:
                print(f"step {step}: {losses.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
