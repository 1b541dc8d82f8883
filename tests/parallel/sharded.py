"""A small model with all that is awkward to shard, and one step of it; for the tests of sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.share import list_numbers
from paceline.mesh import Mesh, build_mesh
from paceline.parallel.shard.setup import ShardSettings
from paceline.parallel.shard.shards import Shards
from paceline.recipe.layout import Layout
from paceline.world import World

VOCAB, WIDTH, INNER, LENGTH = 11, 12, 13, 5


class Block(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.gain * (self.down(F.gelu(self.up(y))) + self.frozen(y))


class Toy(nn.Module):
    """A language model without attention; the embedding is the head too."""

    def __init__(self, num_blocks: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
            self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def microbatch(index: int, step: int = 0) -> Tensor:
    """Token ids [2, LENGTH + 1] of one microbatch."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)


def sum_losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the token losses, their number)."""
    logits = model(ids[:, :-1])
    targets = ids[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, torch.tensor(float(targets.numel()))


def build_shards(
    world: World,
    layout: str,
    model: nn.Module,
    *,
    exact: bool = False,
    offload: str = "none",
    **settings: Any,
) -> tuple[Shards, Mesh]:
    """Return the model sharded by a layout's words."""
    parsed = Layout.parse(layout).resolve(world.world_size)
    mesh = build_mesh(parsed, world)
    group = mesh.borrow_group(mesh.dp) if exact else None
    shards = Shards(
        model, mesh, ShardSettings(**settings), zero=parsed.zero, offload=offload, exact_group=group
    )
    return shards, mesh


def run_step(
    shards: Shards, model: nn.Module, rank: int, num_owned: Sequence[int], step: int = 0, turns: int = 1
) -> None:
    """Run all rounds of one step; gradients are those of the sum of losses."""
    for parameter in model.parameters():
        parameter.grad = None
    shards.begin(tuple(num_owned), turns)
    own = list_numbers(tuple(num_owned), turns, rank)
    for number in range(shards.num_rounds):
        index = own[number] if number < len(own) else None
        with shards.synchronising(number == shards.num_rounds - 1, index):
            ids = microbatch(0 if index is None else index, step)
            loss, _ = sum_losses(model, ids)
            shards.backward(loss)
    if shards.num_rounds:
        shards.check_reduced()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor; collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by name; collective."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_one_process(model: nn.Module, num_microbatches: int, step: int = 0) -> dict[str, Tensor]:
    """Return the gradients that one process computes from the same microbatches."""
    for index in range(num_microbatches):
        sum_losses(model, microbatch(index, step))[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
