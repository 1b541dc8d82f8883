"""Messages and bytes of sharding, recorded at the library, compared with theory.

Bytes are those that one rank sends on a ring: (n-1) times its shard for an all-gather, (n-1)/n of the vector
for a reduce-scatter (ours is an all-to-all, which sends the same), twice that for an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.replicate import Replica, ReplicaSettings
from paceline.recipe.layout import Layout
from paceline.recipe.schema import GptModel
from paceline.torch_seams.fsdp import list_groups
from tests.dist.pool import Pool
from tests.dist.recorder import RECORD, count_recorded, recorded_collectives
from tests.parallel.sharded import LENGTH, build_shards, microbatch, run_step, sum_losses

LAYERS = 4
KINDS = ("all_gather", "all_to_all", "all_reduce")


def build_gpt() -> nn.Module:
    """Build a model whose first dimensions are multiples of 8, so that nothing is padded."""
    torch.manual_seed(0)
    section = GptModel(kind="gpt", layers=LAYERS, hidden=32, heads=4, tie_embeddings=False)
    return Gpt(section, 16, LENGTH)


def count(tensors: Any) -> int:
    return sum(t.numel() for t in tensors)


def sizes() -> tuple[int, int]:
    """Return the elements of one block, and of all parameters outside of the blocks."""
    model = build_gpt()
    block = count(model.layers[0].parameters())
    return block, count(model.parameters()) - LAYERS * block


def read_traffic(since: int, num_ranks: dict[str, int]) -> tuple[Counter[str], Counter[str]]:
    """Return per kind of collective their number, and the number of elements that this rank sent."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for name, (numel, *_) in recorded_collectives(since):
        if name == "broadcast":  # DDP's new order of the buckets, once
            continue
        kind = next(k for k in KINDS if k in name.replace("allgather", "all_gather"))
        n = num_ranks[kind]
        calls[kind] += 1
        factor = {"all_gather": n - 1, "all_to_all": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}[kind]
        sent[kind] += round(factor * numel)
    return calls, sent


def shard_traffic(world: Any, layout: str, num_microbatches: int, settings: dict[str, Any]) -> Any:
    model = build_gpt()
    shards, mesh = build_shards(world, layout, model, **settings)
    owned = (num_microbatches,) * mesh.dp.size
    run_step(shards, model, mesh.dp.rank, owned)
    since = count_recorded()
    run_step(shards, model, mesh.dp.rank, owned)
    of_shards, of_replicas = mesh.dp_shard.size, mesh.dp_replicate.size
    degrees = {"all_gather": of_shards, "all_to_all": of_shards, "all_reduce": of_replicas}
    calls, sent = read_traffic(since, degrees)
    return dict(calls), dict(sent)


def ddp_traffic(world: Any) -> Any:
    model = build_gpt()
    mesh = build_mesh(Layout.parse("").resolve(world.world_size), world)
    replica = Replica(model, mesh.dp_replicate, ReplicaSettings())
    since = count_recorded()
    replica.backward(sum_losses(model, microbatch(0))[0])
    return dict(read_traffic(since, {"all_reduce": world.world_size})[1])


@pytest.mark.parametrize("nproc", [2, 4])
def test_zero_3_sends_one_and_a_half_times_what_ddp_sends(ranks: Pool, nproc: int) -> None:
    block, rest = sizes()
    calls, sent = ranks.run(shard_traffic, nproc, (f"dp_shard={nproc}", 1, {}), env=RECORD)[0]
    ddp = ranks.run(ddp_traffic, nproc, (), env=RECORD)[0]
    # Blocks are gathered for forward and for backward; what is around them stays in between.
    assert calls == {"all_gather": 2 * LAYERS + 1, "all_to_all": LAYERS + 1}
    part = (nproc - 1) / nproc
    assert sent["all_gather"] == part * (2 * LAYERS * block + rest)
    assert sent["all_to_all"] == part * (LAYERS * block + rest)
    assert ddp["all_reduce"] == 2 * part * (LAYERS * block + rest)
    assert sum(sent.values()) + part * rest == 1.5 * ddp["all_reduce"]


@pytest.mark.parametrize("k", [1, 4])
def test_zero_1_reduces_once_and_zero_2_every_time(ranks: Pool, k: int) -> None:
    block, rest = sizes()
    whole = LAYERS * block + rest
    traffic = {
        z: ranks.run(shard_traffic, 2, (f"dp_shard=2 zero={z}", k, {}), env=RECORD)[0] for z in (1, 2, 3)
    }
    reduced = {zero: sent["all_to_all"] for zero, (_, sent) in traffic.items()}
    assert reduced == {1: whole / 2, 2: k * whole / 2, 3: k * whole / 2}
    assert 1 - reduced[1] / reduced[2] == (k - 1) / k
    gathered = {zero: sent["all_gather"] for zero, (_, sent) in traffic.items()}
    assert gathered == {1: whole / 2, 2: whole / 2, 3: k * (2 * LAYERS * block + rest) / 2}


def test_replicas_are_summed_once_per_step(ranks: Pool) -> None:
    block, rest = sizes()
    whole = LAYERS * block + rest
    for k in (1, 3):
        layout = "dp_replicate=2 dp_shard=2"
        calls, sent = ranks.run(shard_traffic, 4, (layout, k, {}), env=RECORD)[0]
        assert calls["all_reduce"] == LAYERS + 1
        assert sent["all_reduce"] == whole / 2  # 2 (n-1)/n of a half
        assert sent["all_to_all"] == k * whole / 2


def test_settings_change_what_is_gathered(ranks: Pool) -> None:
    block, rest = sizes()
    for prefetch in (0, 2, 9):
        calls, sent = ranks.run(shard_traffic, 2, ("dp_shard=2", 1, {"prefetch": prefetch}), env=RECORD)[0]
        assert calls["all_gather"] == 2 * LAYERS + 1
        assert sent["all_gather"] == (2 * LAYERS * block + rest) / 2


def narrow_parameters(world: Any, param_dtype: str) -> Any:
    """Return bytes of the gathers, loss and gradients of a step."""
    model = build_gpt()
    shards, _ = build_shards(world, "dp_shard=2", model, param_dtype=param_dtype)
    sent: Counter[torch.dtype] = Counter()
    for unit in shards.units:
        group = list_groups(unit.module)[0]
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            _count_bytes(getattr(group, name), sent)
    shards.begin((1, 1))
    with shards.synchronising(True, world.rank):
        loss, _ = sum_losses(model, microbatch(world.rank))
        shards.backward(loss)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return loss.detach(), gradients, dict(sent)


def _count_bytes(comm: Any, sent: Counter[Any]) -> None:
    kind = type(comm)

    class Counting(kind):  # type: ignore[misc, valid-type]
        def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent[kind.__name__, input_tensor.dtype] += input_tensor.nbytes
            return kind.__call__(self, output_tensor, input_tensor, *args, **kwargs)

    comm.__class__ = Counting


def test_narrow_parameters_halve_the_gathers_and_sum_wide(ranks: Pool) -> None:
    wide, narrow = (ranks.run(narrow_parameters, 2, (kind,)) for kind in ("none", "bf16"))
    gather = "GatherChunks"
    assert narrow[0][2][gather, torch.bfloat16] * 2 == wide[0][2][gather, torch.float32]
    assert narrow[0][2]["ChunkSum", torch.float32] == wide[0][2]["ChunkSum", torch.float32]
    assert len(narrow[0][2]) == len(wide[0][2]) == 2, "one type each"
    assert float(narrow[0][0]) != float(wide[0][0])
    assert float(narrow[0][0]) == pytest.approx(float(wide[0][0]), rel=0.01)
    for name, gradient in wide[0][1].items():
        error = (narrow[0][1][name] - gradient).norm() / gradient.norm()
        assert 0 < error < 0.05, (name, error)
