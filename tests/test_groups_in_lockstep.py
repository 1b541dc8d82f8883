"""Every rank makes its groups at the same places in the order, for many layouts.

With a device bound, torch makes a group of NCCL by splitting the world's communicator, which every rank must
take part in. A rank that makes one group more or fewer than the others hangs all of them.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.recipe.layout import Layout
from paceline.world import World


def list_groups(layout: Layout, num_ranks: int, rank: int) -> list[tuple[int, ...]]:
    """Return the groups that a rank makes and is in, in order, also those that experts and sums borrow."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    made: list[tuple[int, ...]] = []
    right = dist.distributed_c10d._new_group_with_tag

    def new(ranks: Any = None, *args: Any, **settings: Any) -> Any:
        found = right(ranks, *args, **settings)
        if rank in (ranks or ()):
            made.append(tuple(ranks))
        return found

    world = World(
        rank=rank,
        local_rank=rank,
        world_size=num_ranks,
        local_world_size=num_ranks,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="fake",
        launcher="torchrun",
        timeout_s=1,
        seed=0,
        deterministic=False,
    )
    try:
        with mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", new):
            mesh = build_mesh(layout, world)
            axes = (mesh.ep_data, mesh.ep_cp, mesh.expert_replicas) if layout.ep > 1 else ()
            for axis in (*axes, mesh.dp):
                if axis.size > 1:
                    mesh.borrow_group(axis)
    finally:
        dist.destroy_process_group()
    return made


def list_layouts(num_ranks: int) -> list[Layout]:
    degrees = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    found = []
    for pp, replicas, shards, cp, tp, ep in itertools.product(degrees, repeat=6):
        if pp * replicas * shards * cp * tp == num_ranks and (replicas * shards * cp) % ep == 0:
            layout = Layout(pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp, ep=ep)
            try:
                found.append(layout.resolve(num_ranks))
            except PacelineError:
                continue
    return found


@pytest.mark.parametrize("num_ranks", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_groups_are_made_in_lockstep(num_ranks: int) -> None:
    layouts = list_layouts(num_ranks)
    assert len(layouts) > 20
    for layout in layouts:
        made = [list_groups(layout, num_ranks, rank) for rank in range(num_ranks)]
        assert len({len(own) for own in made}) == 1, layout
        for groups in zip(*made, strict=True):  # at one place in the order
            assert all(groups[member] == ranks for ranks in groups for member in ranks), (layout, groups)


def test_axes_of_one_rank_have_no_groups_of_their_own() -> None:
    """All of them share one, of the rank alone."""
    made = list_groups(Layout(dp_replicate=2, tp=2).resolve(4), 4, 1)
    assert [ranks for ranks in made if len(ranks) == 1] == [(1,)]
