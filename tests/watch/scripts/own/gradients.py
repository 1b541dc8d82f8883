"""Trains with DistributedDataParallel; what becomes of gradients on rank 1 comes from the command line."""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.mean = nn.Linear(16, 1)
        self.spread = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.mean(h), self.spread(h)


def compute_loss(mean: torch.Tensor, spread: torch.Tensor, is_bad: bool) -> torch.Tensor:
    weight = torch.log(torch.zeros(())) if is_bad else torch.ones(())
    return mean.pow(2).mean() + (spread.pow(2) * weight).mean()


def main() -> None:
    how, num_steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaled")
    micro = 2 if how == "accumulate" else 1
    bad_steps = (3, 6) if how == "scaled" else (num_steps - 1,)
    for step in range(num_steps):
        optimizer.zero_grad()
        for n in range(micro):
            is_bad = rank == 1 and step in bad_steps and n == 0
            with model.no_sync() if n < micro - 1 else nullcontext():
                loss = compute_loss(*model(torch.randn(8, 6)), is_bad)
                scaler.scale(loss / micro).backward()  # BACKWARD
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        time.sleep(0.02)
    is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    print(f"rank {rank} weights {'finite' if is_finite else 'not finite'}", flush=True)
    if how == "fail":
        raise SystemExit("the loss is not finite")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
