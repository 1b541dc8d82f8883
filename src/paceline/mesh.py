"""Turns a layout's degrees into groups of ranks; with `world.py`, the only file that makes groups.

Rank = ((replica * dp_shard) + shard) * tp + tp rank: the axis that talks most has neighbouring ranks, which
are those of one node where its degree allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.recipe.layout import Layout
from paceline.world import World

NAMES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Axis:
    """This rank's place among those that differ from it in some degrees only.

    Attributes:
        name: `dp_replicate`, `dp_shard`, `tp`, `dp` for the first two together, `model` for the last two.
        size: how many ranks these are.
        rank: this one's number among them.
        group: their process group.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup


class Mesh:
    """The ranks of a layout by axis; for worlds of two and more ranks.

    Attributes:
        layout: the degrees, resolved.
        dp_replicate, dp_shard, tp: the axes.
        dp: all ranks that hold different microbatches of this one's tp place: dp_replicate times dp_shard.
        model: all ranks that hold one copy of the model among them: dp_shard times tp.
        device_mesh: torch's mesh, three-dimensional, its dimensions named as the axes.
    """

    def __init__(self, layout: Layout, device_mesh: DeviceMesh, world: World) -> None:
        self.layout = layout
        self._spare = world.spare_groups
        self.device_mesh = device_mesh
        self.dp_replicate, self.dp_shard, self.tp = (_read_axis(name, device_mesh[name]) for name in NAMES)
        self.dp = self._join("dp", "dp_replicate", "dp_shard")
        self.model = self._join("model", "dp_shard", "tp")

    def borrow_group(self, axis: Axis) -> dist.ProcessGroup:
        """A second group over the ranks of an axis, with a sequence of collectives of its own.

        The ranks of the axis must call it, in the same order as other calls that make groups, and return
        it in the same order. It is made, or one that was returned: torch names a group that is made by its
        members alone after their ranks, so that one made after another was destroyed would read that one's
        addresses in the store, and hang.
        """
        ranks = dist.get_process_group_ranks(axis.group)
        spare = self._spare.setdefault(tuple(ranks), [])
        if spare:
            return spare.pop()
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group

    def return_group(self, group: dist.ProcessGroup) -> None:
        """Gives it to who borrows next; none of its collectives may be under way."""
        if dist.is_initialized():
            self._spare[tuple(dist.get_process_group_ranks(group))].append(group)

    def _join(self, name: str, outer: str, inner: str) -> Axis:
        """Two axes as one; no group of its own where one of them is all of it."""
        for one, other in ((outer, inner), (inner, outer)):
            if getattr(self, other).size == 1:
                axis: Axis = getattr(self, one)
                return replace(axis, name=name)
        return _read_axis(name, self.device_mesh[outer, inner]._flatten(name))


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Gives the mesh of all ranks; all must call it, in the same order as other calls that make groups.

    Meshes of the same degrees share their groups.

    Raises:
        PacelineError: PL113 where the degrees don't multiply to the number of ranks.
    """
    layout = layout.resolve(world.world_size)
    degrees = tuple(getattr(layout, name) for name in NAMES)
    if degrees not in world.device_meshes:
        made = init_device_mesh(world.device.type, degrees, mesh_dim_names=NAMES)
        world.device_meshes[degrees] = made
    return Mesh(layout, world.device_meshes[degrees], world)


def _read_axis(name: str, mesh: DeviceMesh) -> Axis:
    return Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group())
