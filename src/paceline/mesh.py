"""Turns a layout's degrees into groups of ranks; only this file and `world.py` make groups.

The axes, and their order in the rank number, are those of the table in `recipe/axes.py`. Rank =
((((stage * dp_replicate) + replica) * dp_shard + shard) * cp + cp rank) * tp + tp rank, so the ranks of the
last axis have consecutive numbers. An axis within others, as ep is within dp_replicate, dp_shard and cp,
divides the ranks of these into groups of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.pipeline.orders import find_homes
from paceline.recipe.axes import list_axes
from paceline.recipe.layout import Layout
from paceline.world import World


@dataclass(frozen=True)
class Axis:
    """This rank's place among the ranks that differ from it only along one or several axes.

    Attributes:
        name: of an axis of the layout, or of several together: `dp`, `replicas`, `model`; or of some ranks of
            several: `ep_data`, `ep_cp`, `expert_replicas`.
        size: the number of these ranks.
        rank: this rank's number among them.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup


class Mesh:
    """The ranks of a layout by axis; for worlds of at least two ranks.

    Attributes:
        layout: the degrees, resolved.
        axes: every axis of the layout, by name.
        pp, dp_replicate, ep, dp_shard, cp, tp: each of them.
        dp: the ranks that run different microbatches and have this rank's place on the other axes.
        replicas: the ranks of dp that hold the same parts of the model, experts apart.
        ep_data, ep_cp: the ranks of ep that differ from this one in their data, or in their place of cp.
        expert_replicas: the data ranks that hold the same experts; those of `replicas` without ep.
        model: the ranks that together hold one copy of the model.
        homes: by stage of the model, the rank of pp that holds it.
        group: all ranks of the mesh.
        device: that this rank computes on.
    """

    def __init__(self, layout: Layout, world: World, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.group = group
        self._world = world
        self._ranks = dist.get_process_group_ranks(group)
        self.device = world.device
        self.axes: dict[str, Axis] = {}
        for name in list_axes(multiplies=True):
            self.axes[name] = self._span(name, (name,))
        self.axes |= {name: self._group(name, (name,)) for name in list_axes(multiplies=False)}
        self.pp, self.dp_replicate, self.ep, self.dp_shard, self.cp, self.tp = (
            self.axes[name] for name in ("pp", "dp_replicate", "ep", "dp_shard", "cp", "tp")
        )
        self.ep_data = self._divide_ep("ep_data", "dp_replicate", "dp_shard")
        self.ep_cp = self._divide_ep("ep_cp", "cp")
        self.dp = self._join("dp", list_axes(shares_data=True, multiplies=True))
        self.replicas = self._join("replicas", list_axes(shares_data=True, divides_model=False))
        self.expert_replicas = replace(self.replicas, name="expert_replicas")
        if self.ep.size > 1:
            self.expert_replicas = self._group("expert_replicas", ("dp_replicate", "dp_shard"))
        self.model = self._join("model", list_axes(divides_model=True))
        self.homes = find_homes(layout.schedule, layout.pp, layout.chunks)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """torch's mesh of dp_shard.

        torch keeps descriptions of tensors, and takes those on equal meshes for the same. The group's name
        makes a mesh differ from those of another world of this process.
        """
        group = self.dp_shard.group
        name = f"dp_shard:{group.group_name}"
        return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=(name,))

    @property
    def reports(self) -> bool:
        """Whether this rank reports its samples' results, so that a sum over ranks counts each sample once.

        Of the ranks that run the same microbatches, the first that has the model's output reports. Under pp
        that is the rank of the last stage.
        """
        if self.pp.rank != self.homes[-1]:
            return False
        return all(self.axes[name].rank == 0 for name in list_axes(shares_data=False) if name != "pp")

    def borrow_group(self, axis: Axis) -> dist.ProcessGroup:
        """Return a second group over the ranks of an axis, with its own sequence of collectives.

        The ranks of the axis must call it, in the same order as other calls that make groups, and return
        groups in the same order. Returned groups are reused, never destroyed: torch derives the name of a
        group that only its members make from their ranks. A group made after another of the same ranks was
        destroyed would read the old addresses in the store, and hang.
        """
        ranks = dist.get_process_group_ranks(axis.group)
        spare = self._world.spare_groups.setdefault(tuple(ranks), [])
        return spare.pop() if spare else _new_group(ranks, self._world, axis.name)

    def return_group(self, group: dist.ProcessGroup) -> None:
        """Return a borrowed group for reuse; none of its collectives may be in progress."""
        if dist.is_initialized():
            self._world.spare_groups[tuple(dist.get_process_group_ranks(group))].append(group)

    def _join(self, name: str, axes: tuple[str, ...]) -> Axis:
        """Return several axes as one."""
        several = tuple(axis for axis in axes if self.axes[axis].size > 1)
        if any(axis in several for axis in list_axes(multiplies=False)):
            return self._group(name, several)
        return self._span(name, several)

    def _span(self, name: str, axes: tuple[str, ...]) -> Axis:
        """Return the ranks with this one's places on all other axes of the mesh."""
        kept = [axis for axis in list_axes(multiplies=True) if axis not in axes]
        return self._pick_own(name, self.layout.group_by(kept))

    def _group(self, name: str, axes: tuple[str, ...]) -> Axis:
        """Return the ranks that differ from this one along these axes only, by their steps."""
        return self._pick_own(name, self.layout.list_groups(axes))

    def _pick_own(self, name: str, groups: list[list[int]]) -> Axis:
        """Return that of the groups of places which has this rank's."""
        places = next(places for places in groups if self.group.rank() in places)
        return self._find_group(name, [self._ranks[place] for place in places])

    def _divide_ep(self, name: str, *axes: str) -> Axis:
        """Return the ranks of ep that differ from this one along these axes only."""
        members = dist.get_process_group_ranks(self.ep.group)
        places = {rank: self.layout.find_place(self._ranks.index(rank)) for rank in members}
        kept = [axis for axis in self.layout.degrees if axis not in axes]
        own = places[self._world.rank]
        return self._find_group(
            name, [rank for rank, place in places.items() if all(place[axis] == own[axis] for axis in kept)]
        )

    def _find_group(self, name: str, ranks: list[int]) -> Axis:
        """Return an axis of these ranks, which include this one; make a group if there is none."""
        group = self.group if ranks == self._ranks else _make_group(ranks, self._world, name)
        return Axis(name, len(ranks), ranks.index(self._world.rank), group)


def build_mesh(layout: Layout, world: World, num_blocks: int = 1) -> Mesh:
    """Return the mesh of all ranks; all must call it, in the same order as other calls that make groups.

    Meshes of the same degrees share their groups.

    Args:
        num_blocks: equal blocks of consecutive ranks, each of which is a mesh of its own.
    """
    layout = layout.resolve(world.world_size // num_blocks)
    group = dist.group.WORLD
    if num_blocks > 1:
        first = world.rank - world.rank % layout.num_ranks
        group = _make_group(range(first, first + layout.num_ranks), world, "block")
    assert group is not None
    return Mesh(layout, world, group)


def join_blocks(world: World, num_blocks: int) -> dist.ProcessGroup:
    """Return the group of the ranks with this one's place in equal blocks of ranks; collective."""
    size = world.world_size // num_blocks
    return _make_group(range(world.rank % size, world.world_size, size), world, "blocks")


def join_senders(world: World) -> dist.ProcessGroup:
    """Return a group of all ranks for messages from one to another, in the hosts' memory; collective."""
    key = (*range(world.world_size), -1)  # no other code uses it
    if key not in world.groups:
        world.groups[key] = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    return world.groups[key]


def _make_group(ranks: Sequence[int], world: World, name: str) -> dist.ProcessGroup:
    """Return a group of these ranks, which include this one; make it if there is none."""
    if tuple(ranks) not in world.groups:
        world.groups[tuple(ranks)] = _new_group(list(ranks), world, name)
    return world.groups[tuple(ranks)]


def _new_group(ranks: list[int], world: World, name: str) -> dist.ProcessGroup:
    """Make a group; torch's own default is another timeout than that of all ranks."""
    timeout = timedelta(seconds=world.timeout_s)
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout, use_local_synchronization=True, group_desc=f"mesh_{name}"
    )
    return group
