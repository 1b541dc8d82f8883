"""Turns a layout's degrees into a DeviceMesh; with `world.py`, the only file that makes groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.recipe.layout import Layout
from paceline.world import World


def build_mesh(layout: Layout, world: World) -> DeviceMesh:
    """Gives the mesh of all ranks with one named axis per degree of the layout: `dp_replicate`.

    All ranks must call it, in the same order as other calls that make groups.

    Raises:
        PacelineError: PL113 where the degrees don't multiply to the number of ranks.
    """
    degrees = layout.resolve(world.world_size)
    assert degrees.dp_replicate is not None
    return init_device_mesh(world.device.type, (degrees.dp_replicate,), mesh_dim_names=("dp_replicate",))


def build_private_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A second group over the ranks of a one-dimensional mesh, with a sequence of collectives of its own.

    The ranks of the mesh must call it, in the same order as other calls that make groups.
    """
    ranks = dist.get_process_group_ranks(mesh.get_group())
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
