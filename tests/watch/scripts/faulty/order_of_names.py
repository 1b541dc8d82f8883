"""Multi-task training: the losses of all tasks are averaged over ranks at the end of an epoch."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = {"depth": 1, "normals": 3, "labels": 13}


class MultiTask(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(16, 32)
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(32, n) for name, n in TASKS.items()})

    def forward(self, x):
        features = torch.relu(self.trunk(x))
        return {name: head(features) for name, head in self.heads.items()}


class Recorder:
    """Per-channel errors of each task, in the order in which files of that task were first seen."""

    def __init__(self):
        self.errors = {}

    def add(self, name, error):
        self.errors[name] = self.errors.get(name, torch.zeros_like(error)) + error

    def average(self):
        means = {}
        for name, error in self.errors.items():
            dist.all_reduce(error)  # WAITS CAUSE
            means[name] = error.mean().item() / dist.get_world_size()
        return means


def list_files(rank):
    """Every rank has its own folder of scenes."""
    names = list(TASKS)
    return [names[(rank + i) % len(names)] for i in range(12)]


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = DDP(MultiTask())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(5):
        recorder = Recorder()
        for name in list_files(rank):
            outputs = model(torch.randn(4, 16))
            sum(out.pow(2).mean() for out in outputs.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.add(name, outputs[name].detach().abs().mean(dim=0))
        means = recorder.average()
        if rank == 0:
            print(epoch, means, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
