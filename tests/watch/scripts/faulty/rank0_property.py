"""Trains on all ranks; rank 0 writes a summary file that the others read for the report."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist


class AverageMeter:
    """Running average over steps and ranks."""

    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        stats = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(stats)  # WAITS
        return (stats[0] / stats[1]).item()


def train(steps, meter):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(16, 4)
        loss = (model(x) - x.mean(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        meter.update(loss.item(), n=len(x))


def wait_for(path):
    while not path.exists():
        time.sleep(0.2)  # CAUSE
    return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("summary.json"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    meter = AverageMeter()
    train(args.steps, meter)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps({"steps": args.steps, "loss": meter.avg}))
    summary = wait_for(args.out)
    print(f"rank {dist.get_rank()}: loss {summary['loss']:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
