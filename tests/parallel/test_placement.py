"""Parts of tensors and back: every cut, uneven rows, and ranks without rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from paceline.mesh import build_mesh
from paceline.parallel.placement import Placement, local
from paceline.parallel.split import Split
from paceline.recipe import Layout
from tests.dist.pool import Pool

SHAPES = {"even": (8, 3), "uneven": (7, 2), "few": (2, 5), "one": (1, 4), "vector": (6,), "cube": (4, 6, 2)}
SPLITS = {"even": Split(0, 1, 2), "cube": Split(1, 1, 2)}


class Tensors(nn.Module):
    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def make_wholes(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def take_apart(world: Any, layout: str, dtype: torch.dtype) -> None:
    mesh = build_mesh(Layout.parse(layout).resolve(world.world_size), world)
    wholes = make_wholes(dtype)
    splits = SPLITS if mesh.tp.size > 1 else {}
    parts = {
        name: splits[name].take(whole, mesh.tp.rank) if name in splits else whole
        for name, whole in wholes.items()
    }
    model = Tensors(parts)
    if mesh.dp_shard.size > 1:
        fully_shard(model, mesh=mesh.shard_mesh)
    placement = Placement(model, mesh, splits)
    assert placement.is_divided
    for name, parameter in model.named_parameters():
        assert placement.whole_shape(name, parameter) == list(SHAPES[name])
        whole = placement.whole(name, parameter)
        assert torch.equal(whole, wholes[name]), name
        assert torch.equal(placement.part(name, wholes[name], parameter), local(parameter.detach())), name
        placement.write(name, parameter, wholes[name] * 2)
        assert torch.equal(placement.whole(name, parameter.detach()), wholes[name] * 2), name
        moment = torch.zeros_like(parameter) + 1
        assert placement.lies_as(moment, parameter)
        assert torch.equal(placement.whole(name, moment), torch.ones_like(wholes[name])), name
        axes = ["dp_shard"] * (mesh.dp_shard.size > 1) + ["tp"] * (name in splits)
        assert [axis.name for axis in placement.part_axes(name, parameter)] == axes
        held = torch.tensor(float(placement.counts(name, parameter)), dtype=torch.float64)
        dist.all_reduce(held, group=mesh.model.group)
        assert held == math.prod(mesh.axes[axis].size for axis in axes), name  # each part once
        is_divided = mesh.dp_shard.size > 1 or name in splits
        assert placement.divides(name, parameter, wholes[name]) == is_divided
        assert not placement.divides(name, parameter, wholes[name][None])
    assert placement.whole("even", torch.tensor(3.0)) == 3.0


@pytest.mark.parametrize(
    ("nproc", "layout"), [(2, "tp=2"), (2, "dp_shard=2"), (4, "dp_shard=4"), (4, "dp_shard=2 tp=2")]
)
def test_parts_become_the_whole(ranks: Pool, nproc: int, layout: str) -> None:
    ranks.run(take_apart, nproc, (layout, torch.float64))
    ranks.run(take_apart, nproc, (layout, torch.bfloat16))
