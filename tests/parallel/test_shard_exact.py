"""The exact reduction gives the same bits however the ranks of dp share the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import hash_tensors
from paceline.data.share import count_owned
from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.replicate import Replica, ReplicaSettings
from paceline.parallel.sums.buckets import BucketSums
from paceline.recipe.layout import Layout
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.sharded import LENGTH, VOCAB, Toy, build_shards, microbatch, run_step, sum_losses, whole

# Microbatches of the global batch, a step each: a power of two, ragged ends, fewer than ranks.
STEPS = [4, 6, 3, 8, 1, 7]


def build_model(kind: str) -> nn.Module:
    if kind == "gpt":
        torch.manual_seed(0)
        section = GptModel(kind="gpt", layers=3, hidden=48, heads=4, tie_embeddings=False)
        return Gpt(section, VOCAB, LENGTH)
    return Toy(dtype=getattr(torch, kind))


def show(model: nn.Module, gradients: list[str]) -> tuple[str, ...]:
    weights = {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}
    return (*gradients, hash_tensors(weights))


def hash_gradients(model: nn.Module) -> str:
    return hash_tensors({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})


def train_sharded(world: Any, layout: str, kind: str, turns: int = 1) -> tuple[str, ...]:
    model = build_model(kind)
    shards, mesh = build_shards(world, layout, model, exact=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = []
    for step, num_microbatches in enumerate(STEPS):
        run_step(shards, model, mesh.dp.rank, count_owned(num_microbatches, mesh.dp.size), step, turns)
        gradients.append(hash_gradients(model))
        optimizer.step()
    return show(model, gradients)


def train_replicated(world: Any, kind: str) -> tuple[str, ...]:
    """With DDP, or alone."""
    model = build_model(kind)
    num_ranks = world.world_size
    mesh = build_mesh(Layout.parse("").resolve(num_ranks), world) if num_ranks > 1 else None
    group = mesh.borrow_group(mesh.dp) if mesh else None
    exact = BucketSums(model, group, torch.device("cpu"))
    replica = Replica(model, mesh.dp_replicate, ReplicaSettings(bucket_cap_mb=0.01), exact) if mesh else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = []
    for step, num_microbatches in enumerate(STEPS):
        num_owned = count_owned(num_microbatches, num_ranks)
        optimizer.zero_grad()
        exact.begin(num_owned)
        _take_microbatches(model, replica, exact, world.rank, num_owned, step)
        exact.end(reduced=replica is not None)
        gradients.append(hash_gradients(model))
        optimizer.step()
    return show(model, gradients)


def _take_microbatches(
    model: nn.Module, replica: Replica | None, exact: Any, rank: int, num_owned: tuple[int, ...], step: int
) -> None:
    def compute(ids: Tensor) -> tuple[Tensor, Tensor]:
        return sum_losses(model, ids)

    first = sum(num_owned[:rank])
    for index in range(first, first + num_owned[rank]):
        is_last = index == first + num_owned[rank] - 1
        ids = microbatch(index, step)
        if replica is None:
            compute(ids)[0].backward()
            exact.set_aside(index)
            continue
        loss = compute(ids)[0]
        if is_last:
            replica.backward(loss)
        else:
            loss.backward()
            exact.set_aside(index)
    if replica is not None and not num_owned[rank]:
        replica.send()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "gpt"])
def test_bits_are_those_of_one_process(ranks: Pool, kind: str) -> None:
    expected = ranks.run(train_replicated, 1, (kind,))[0]
    assert len(set(expected)) == len(STEPS) + 1
    assert ranks.run(train_replicated, 4, (kind,)) == [expected] * 4
    layouts = [
        ("dp_shard=4 zero=1", 1),
        ("dp_shard=4 zero=1", 4),
        ("dp_shard=4 zero=2", 4),
        ("dp_shard=4", 1),
        ("dp_shard=4", 4),
        ("dp_replicate=2 dp_shard=2", 1),
        ("dp_replicate=2 dp_shard=2", 2),
    ]
    for layout, turns in layouts if kind == "float32" else layouts[4::2]:
        assert ranks.run(train_sharded, 4, (layout, kind, turns)) == [expected] * 4, (layout, turns)


def signs_of_a_zero_gradient(world: Any, zero: int) -> list[bool]:
    """Train a model in which the gradient of `sign` is -0.0 in every microbatch."""
    model = Toy()
    model.sign = nn.Parameter(torch.ones(6, dtype=torch.float64))
    shards, mesh = build_shards(world, f"dp_shard=2 zero={zero}", model, exact=True)
    shards.begin((2, 1))
    for number in range(2):
        index = 2 * mesh.dp.rank + number
        with shards.synchronising(number == 1, index if index < 3 else None):
            loss, _ = sum_losses(model, microbatch(index))
            shards.backward(loss + (model.sign * -0.0).sum())
    signs: list[bool] = whole(model.sign.grad).signbit().tolist()
    return signs


def test_rounds_and_ranks_without_a_part_change_no_sign(ranks: Pool) -> None:
    for zero in (1, 3):
        assert ranks.run(signs_of_a_zero_gradient, 2, (zero,)) == [[True] * 6] * 2
