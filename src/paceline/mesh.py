"""Turns a layout's degrees into groups of ranks; with `world.py`, the only file that makes groups.

The axes, and their order in the rank number, are those of the table in `recipe/axes.py`. Rank =
((replica * dp_shard) + shard) * tp + tp rank: the ranks of the last axis are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.recipe.axes import list_axes
from paceline.recipe.layout import Layout
from paceline.torch_seams.groups import flatten
from paceline.world import World


@dataclass(frozen=True)
class Axis:
    """This rank's place among those that differ from it in some degrees only.

    Attributes:
        name: an axis of the layout, or that of several together: `dp`, `replicas`, `model`.
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
        axes: every axis of the layout, by name.
        dp_shard, tp: two of them, for those who carry them out.
        dp: all ranks that hold different microbatches of the rest of this one's place.
        replicas: those of them that hold the same parts of the model.
        model: all ranks that hold one copy of the model among them.
        device_mesh: torch's mesh, with a dimension per axis, named as it.
    """

    def __init__(self, layout: Layout, device_mesh: DeviceMesh, world: World) -> None:
        self.layout = layout
        self._spare = world.spare_groups
        self.device_mesh = device_mesh
        self.axes = {name: _read_axis(name, device_mesh[name]) for name in list_axes()}
        self.dp_replicate, self.dp_shard, self.tp = (
            self.axes[name] for name in ("dp_replicate", "dp_shard", "tp")
        )
        self.dp = self._join("dp", list_axes(shares_data=True))
        self.replicas = self._join("replicas", list_axes(shares_data=True, divides_model=False))
        self.model = self._join("model", list_axes(divides_model=True))

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its samples: sums over all ranks must count each sample once.

        Of the ranks that see the same microbatches the first does.
        """
        return all(self.axes[name].rank == 0 for name in list_axes(shares_data=False))

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

    def _join(self, name: str, axes: tuple[str, ...]) -> Axis:
        """Several axes as one; no group of its own where at most one of them has several ranks."""
        several = [axis for axis in axes if self.axes[axis].size > 1]
        if len(several) > 1:
            return _read_axis(name, flatten(self.device_mesh[tuple(several)], name))
        return replace(self.axes[several[0] if several else axes[0]], name=name)


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Gives the mesh of all ranks; all must call it, in the same order as other calls that make groups.

    Meshes of the same degrees share their groups.

    Raises:
        PacelineError: PL113 where the degrees don't multiply to the number of ranks.
    """
    layout = layout.resolve(world.world_size)
    degrees = tuple(layout.degrees.values())
    if degrees not in world.device_meshes:
        made = init_device_mesh(world.device.type, degrees, mesh_dim_names=tuple(layout.degrees))
        world.device_meshes[degrees] = made
    return Mesh(layout, world.device_meshes[degrees], world)


def _read_axis(name: str, mesh: DeviceMesh) -> Axis:
    return Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group())
