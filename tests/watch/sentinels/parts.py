"""Parts of the designs: small models, data and loops, on the default group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Design = Callable[[], None]
SIZE = 8
NUM = 160


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def make_data(num: int = NUM, seed: int = 1) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num, 16, generator=g), torch.randint(0, 10, (num,), generator=g))


def mlp(out: int = 10, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, out))


def ddp(model: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model if model is not None else mlp(), **settings)


def fully_sharded(mesh: Any = None) -> Any:
    model = mlp()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def sharded(**settings: Any) -> tuple[DistributedSampler[Any], DataLoader[Any]]:
    data = make_data()
    sampler = DistributedSampler(data, **settings)
    return sampler, DataLoader(data, batch_size=SIZE, sampler=sampler)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def average_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world()


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 3,
    after: Callable[[int], None] = lambda number: None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of,
    loader: Any = None,
) -> None:
    """Train as the book says; `after` is called with the number of steps."""
    sampler, own = sharded()
    number = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in own if loader is None else loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
            number += 1
            after(number)
