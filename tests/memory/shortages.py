"""Shortages of memory that are planted, with what is known of each: run as a program, it meets real limits.

python -m tests.memory.shortages raise CASE...    # each in turn, by a limit of the address space
paceline run tests/memory/shortages.py kill CASE    # until the kernel ends it, in a memory cgroup
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MB = 1 << 20


@dataclass(frozen=True)
class Shortage:
    """What is known of a planted shortage.

    Attributes:
        run: takes the number of rounds to go on for; far more than fit.
        cause: see `paceline.memory.causes`.
        at: what the verdict must name: a module, or the variable that holds the memory.
        remedy: the setting that must be among those that save memory.
        budget_mb: what may be allocated before the limit.
        kill_mb: the limit of the cgroup in which the kernel is to end it; 0 for an allocator's error only.
        nproc: the ranks that it takes.
        by_kill_only: whether it is not to be run for an allocator's error in one process.
    """

    run: Callable[[], None]
    cause: str
    at: str
    remedy: str
    budget_mb: int = 200
    kill_mb: int = 0
    nproc: int = 1
    by_kill_only: bool = False


# Where the kernel is to end it, there is more memory.
SCALE = 4 if sys.argv[1:2] == ["kill"] else 1
SHORTAGES: dict[str, Shortage] = {}


def shortage(
    cause: str, at: str, remedy: str, **settings: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(run: Callable[[], None]) -> Callable[[], None]:
        SHORTAGES[run.__name__] = Shortage(run, cause, at, remedy, **settings)
        return run

    return add


# ---- models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6, outputs: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.attention = nn.ModuleList(Attention(16) for _ in range(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.attention:
            x = x + layer(x)
        return self.head(x)


class Pairs(nn.Module):
    """Compares all rows with all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] - x[None]).square().sum(-1)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.pairs = Pairs()

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(self.embed(x))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def train(model: nn.Module, rows: list[int], width: int) -> None:
    optimizer = adam(model)
    for number in rows:
        x = torch.ones(number, width)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- too much to compute at once


@shortage("activations", "blocks.", "microbatch", kill_mb=1000)
def large_batch() -> None:
    train(Net(), [64, 64, 64, 20_000 * SCALE], 64)


@shortage("activations", "attention.", "recompute", kill_mb=1000)
def long_sequence() -> None:
    model = Encoder()
    for length in (64, 64, 3000 * SCALE):
        x = torch.ones(1, length, 4)
        model(x).square().mean().backward()


@shortage("activations", "features.", "microbatch")
def large_images() -> None:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*layers, *[nn.Conv2d(16, 16, 3, padding=1) for _ in range(9)]))
    model(torch.ones(4, 3, 400, 400)).mean().backward()


@shortage("activations", "after the last module", "microbatch")
def large_vocabulary() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 20_000))
    model(torch.zeros(64, dtype=torch.long)).mean().backward()
    logits = model(torch.zeros(900, dtype=torch.long))
    scaled = logits * 2.0
    soft = scaled.softmax(-1)
    (soft.log() * scaled.exp()).mean().backward()


@shortage("activations", "cell", "microbatch", kill_mb=1000)
def long_recurrence() -> None:
    model = nn.Sequential()
    model.add_module("cell", nn.LSTMCell(32, 256))
    model.add_module("head", nn.Linear(256, 1))
    hidden = None
    for _ in range(100_000):
        hidden = model.cell(torch.ones(64, 32), hidden)
    model.head(hidden[0]).mean().backward()


@shortage("activations", "blocks.", "microbatch")
def recomputed_blocks() -> None:
    model = Net(depth=60)
    x = torch.ones(20_000, 64, requires_grad=True)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    model.head(x).mean().backward()


@shortage("request", "pairs", "microbatch")
def one_allocation() -> None:
    model = Contrast()
    for rows in (16, 4000):
        model(torch.ones(rows, 8)).mean().backward()


# ---- what should not be there


@shortage("kept graphs", "losses", "release", kill_mb=1000)
def losses_in_a_list() -> None:
    model = Net()
    losses = []
    for _ in range(100_000):
        losses.append(model(torch.ones(500, 64)).square().mean())


@shortage("kept graphs", "total", "release")
def losses_in_a_sum() -> None:
    model = Net()
    total = torch.zeros(())
    for _ in range(100_000):
        total = total + model(torch.ones(500, 64)).square().mean()


@shortage("kept graphs", "history", "release")
def graphs_retained() -> None:
    model = Net()
    history = {}
    for step in range(100_000):
        loss = model(torch.ones(500, 64)).square().mean()
        loss.backward(retain_graph=True)
        history[step] = loss


@shortage("kept", "outputs", "release", kill_mb=1000)
def outputs_in_a_list() -> None:
    model = Net(outputs=500).eval()
    outputs = []
    with torch.no_grad():
        for _ in range(100_000):
            outputs.append(model(torch.ones(500, 64)))


@shortage("kept", "self.seen", "release")
def samples_kept_by_an_object() -> None:
    Collector().run()


class Collector:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def run(self) -> None:
        model = Net()
        for _ in range(100_000):
            x = torch.ones(4000, 64)
            self.seen.append(x)
            model(x[:10]).mean().backward()


@shortage("kept", "cache", "release")
def arrays_in_a_dict() -> None:
    import numpy as np

    cache = {}
    for step in range(100_000):
        cache[step] = np.ones((1000, 500))


@shortage("evaluation", "no_grad", "no_grad")
def evaluation_without_no_grad() -> None:
    model = Net().eval()
    model(torch.ones(20_000 * SCALE, 64))


# ---- the model


@shortage("model state", "optimizer state", "dp_shard", kill_mb=1000)
def optimizer_state() -> None:
    train(nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(20 * SCALE)]), [2, 2], 1000)


@shortage("model state", "parameters", "dp_shard")
def gradients() -> None:
    model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(14)])
    model(torch.ones(2, 1500)).mean().backward()


@shortage("model state", "parameters", "dp_shard")
def parameters() -> None:
    layers = nn.ModuleList()
    for _ in range(1000):
        layers.append(nn.Linear(1500, 1500))


# ---- the data


@shortage("batch", "pixels", "microbatch")
def large_input() -> None:
    model = nn.Linear(10, 1)
    pixels = torch.ones(4_000_000, 10)
    model(pixels[:10]).mean().backward()
    more = torch.ones(3_000_000, 10)
    model(more).mean().backward()


class Hoard(torch.utils.data.Dataset):
    """Keeps all that it has read."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> Tensor:
        self.read.append(torch.ones(1_000_000))
        return torch.ones(64)


@shortage("loader workers", "2 loader workers", "workers", kill_mb=1500, by_kill_only=True)
def hoarding_workers() -> None:
    model = Net()
    for x in torch.utils.data.DataLoader(Hoard(), batch_size=4, num_workers=2):
        model(x).mean().backward()


@shortage(
    "activations",
    "its batch is larger",
    "microbatch",
    budget_mb=900,
    kill_mb=1600,
    nproc=2,
    by_kill_only=True,
)
def long_sample_on_one_rank() -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = adam(model)
    for step in range(6):
        rows = 100_000 if step == 5 and dist.get_rank() == 1 else 64
        model(torch.ones(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def address_space(budget_mb: int) -> Any:
    """Limit the address space to what it is now and this much more."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + budget_mb * MB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def allow_all() -> None:
    """Lift the limit of the address space: it stands in for an allocator's, which leaves some room."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, most))


def meet(name: str) -> dict[str, Any]:
    """Run into a shortage by the allocator's error, and return its account with the words."""
    from paceline.memory.account_report import account_for
    from paceline.memory.account_words import describe
    from paceline.memory.advice import list_remedies
    from paceline.memory.causes import find_cause
    from paceline.memory.steps import STEPS

    STEPS.install(torch)
    case = SHORTAGES[name]
    with address_space(case.budget_mb):
        try:
            case.run()
        except (RuntimeError, MemoryError) as error:
            allow_all()
            account, words = account_for(error, 0), str(error).splitlines()[0]
        else:
            return {"error": "nothing was raised"}
    if account is None:
        return {"error": words}
    return {
        "cause": find_cause(account),
        "remedies": [[one.name, one.saves, one.fits] for one in list_remedies(account)],
        "words": describe(account),
        "account": asdict(account),
        "error": words,
    }


def main(words: list[str]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    case = SHORTAGES.get(words[-1])
    if words[0] == "kill" and case is not None:
        case.run()
        return
    if words[0] == "limited" and case is not None:
        with address_space(case.budget_mb):
            case.run()
    # What torch loads with the first step is there before the limits.
    train(Net(depth=1), [2], 64)
    checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    for name in words[1:] or list(SHORTAGES):
        # In a process of its own: memory that one has freed would be used by the next.
        if not (pid := os.fork()):
            print(json.dumps({"name": name, **meet(name)}), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
