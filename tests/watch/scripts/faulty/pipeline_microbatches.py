"""A pipeline of two stages with send and recv; the loss is on the last stage."""

import torch
import torch.distributed as dist
from torch import nn

BATCH = 16
WIDTH = 12


def microbatch_size(stage):
    # The last stage also keeps the loss in memory.
    return 4 if stage == 0 else 3


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward_all(self, batch, size):
        for chunk in batch.split(size):
            dist.send(self.layers(chunk[:3]).detach(), dst=self.number + 1)

    def receive_all(self, count, size):
        losses = []
        for _ in range(count):
            x = torch.empty(size, WIDTH)
            dist.recv(x, src=self.number - 1)  # WAITS
            losses.append(self.layers(x).pow(2).mean())
        return torch.stack(losses).sum()


def run_step(stage, batch):
    size = microbatch_size(stage.number)
    count = -(-BATCH // size)
    if stage.number == 0:
        stage.forward_all(batch, size)
        return None
    loss = stage.receive_all(count, size)
    loss.backward()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = Stage(rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    done = torch.zeros(1)
    for step in range(30):
        loss = run_step(stage, torch.randn(BATCH, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(done)  # CAUSE
        if loss is not None and step % 10 == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
