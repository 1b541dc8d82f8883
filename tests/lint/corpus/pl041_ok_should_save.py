"""Saving behind a property of a settings object."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Run:
    folder: Path = Path("runs/base")
    save_every: int = 500

    @property
    def should_save(self):
        return dist.get_rank() == 0


def checkpoint(run, model, step):
    if not run.should_save:
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "model": model.module.state_dict()}, run.folder / f"{step}.pt")


dist.init_process_group("gloo")
run = Run()
model = DDP(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000):
    optimizer.zero_grad()
    model(torch.randn(4, 10)).square().mean().backward()
    optimizer.step()
    if step % run.save_every == 0:
        checkpoint(run, model, step)
        dist.barrier()
