"""Trains until memory runs out, or with the setting that would have fitted.

python training.py CASE [VALUE]      # VALUE of the setting; left out, the case is as it was
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, ROWS, STEPS = 64, 6, 60_000, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recomputes: bool = False, outputs: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, outputs)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def train(rows: int, *, parts: int = 1, recomputes: bool = False, is_half: bool = False) -> None:
    model = Net(recomputes)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in [256] * STEPS + [rows] * STEPS:
        x = torch.ones(number, WIDTH)
        for part in x.chunk(parts):
            with torch.autocast("cpu", torch.bfloat16) if is_half else nullcontext():
                loss = model(part).float().square().mean() / parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def microbatch(value: str) -> None:
    train(ROWS, parts=-(-ROWS // int(value)) if value else 1)


def recompute(value: str) -> None:
    train(ROWS, recomputes=bool(value))


def bf16(value: str) -> None:
    train(ROWS, is_half=bool(value))


def release(value: str) -> None:
    model = Net()
    losses = []
    for _ in range(400):
        loss = model(torch.ones(1000, WIDTH)).square().mean()
        losses.append(loss.item() if value else loss)


def kept(value: str) -> None:
    model = Net(outputs=500)
    outputs = []
    with torch.no_grad():
        for _ in range(1000):
            output = model(torch.ones(1000, WIDTH))
            if not value:
                outputs.append(output)


def no_grad(value: str) -> None:
    model = Net().eval()
    with torch.no_grad() if value else nullcontext():
        for rows in (256, ROWS):
            model(torch.ones(rows, WIDTH))


def dp_shard(value: str) -> None:
    layers = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(64)])
    if value:
        dist.init_process_group("gloo")
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(STEPS):
        layers(torch.ones(2, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if value:
        dist.destroy_process_group()


CASES = {run.__name__: run for run in (microbatch, recompute, bf16, release, kept, no_grad, dp_shard)}


def read_peak() -> int:
    """Return the most anonymous and shared memory of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    kib = {name: int(number) for name, number in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return 1024 * (kib["VmHWM"] - kib["RssFile"])


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    CASES[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
    print(f"peak of rank {os.environ.get('RANK', '0')}: {read_peak()}", flush=True)


if __name__ == "__main__":
    main()
