"""Rank 0 scores the checkpoint with an outside program, which computes for some seconds."""

import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

SCORER = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
count = 0
while time.monotonic() < end:
    count += sum(i * i for i in range(1000)) % 7
print(f"{count % 100 / 100:.2f}")
"""


def score(seconds):
    command = [sys.executable, "-c", SCORER, str(seconds)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(answer.stdout)


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(8, 12)
        loss = (model(x) - x.clamp(-1, 1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(12, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    result = torch.zeros(1)
    for epoch in range(2):
        loss = train(model, optimizer, steps=30)
        if rank == 0 and epoch == 1:
            result[0] = score(seconds=7)
        dist.broadcast(result, src=0)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, score {result.item():.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
