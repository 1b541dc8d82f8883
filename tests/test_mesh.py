"""Ranks by axis, as torch's groups have them and as the layout says."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from paceline.mesh import build_mesh
from paceline.recipe import Layout
from paceline.recipe.axes import list_axes
from tests.dist.pool import Pool


def read_groups(world: Any, text: str) -> tuple[dict[str, list[int]], bool]:
    mesh = build_mesh(Layout.parse(text), world)
    joined = (mesh.dp, mesh.replicas, mesh.expert_replicas, mesh.model, mesh.ep_data, mesh.ep_cp)
    axes = {**mesh.axes, **{axis.name: axis for axis in joined}}
    for name, axis in axes.items():
        ranks = dist.get_process_group_ranks(axis.group)
        assert (axis.size, axis.rank) == (len(ranks), ranks.index(world.rank)), name
    assert mesh.dp.rank == mesh.layout.find_dp_rank(world.rank)
    return {name: dist.get_process_group_ranks(axis.group) for name, axis in axes.items()}, mesh.reports


@pytest.mark.parametrize(
    "text",
    [
        *("dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "dp_replicate=4 ep=2"),
        *("dp_shard=4 ep=2", "dp_replicate=2 dp_shard=2 ep=4", "dp_replicate=2 dp_shard=2 ep=2"),
        *("dp_replicate=2 cp=2 ep=4", "dp_shard=2 cp=2 ep=2", "cp=4 ep=2"),
    ],
)
def test_groups_are_those_of_the_layout(ranks: Pool, text: str) -> None:
    layout = Layout.parse(text).resolve(4)
    several = list_axes(multiplies=True)
    expected = {name: layout.group_by([axis for axis in several if axis != name]) for name in several}
    expected |= {
        "ep": layout.list_groups(("ep",)),
        "dp": layout.group_by(list_axes(shares_data=False, multiplies=True)),
        "replicas": expected["dp_replicate"],
        "expert_replicas": layout.list_groups(("dp_replicate", "dp_shard")),
        "model": layout.list_groups(list_axes(divides_model=True)),
    }
    if layout.ep == 1:
        expected["expert_replicas"] = expected["replicas"]
    found = ranks.run(read_groups, nproc=4, args=(text,))
    for rank, (groups, _) in enumerate(found):
        for name, known in expected.items():
            assert groups[name] in known, name
            assert rank in groups[name]
    # One rank reports for each place of dp.
    reporting = [rank for rank, (_, reports) in enumerate(found) if reports]
    assert [layout.find_dp_rank(rank) for rank in reporting] == list(range(layout.dp))
