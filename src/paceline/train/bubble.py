"""Computes the bubble of a step: the share of it in which each rank of a pipeline waited."""

from __future__ import annotations

from statistics import fmean

import torch

from paceline.mesh import Mesh
from paceline.train.agreement import Agreed


def find_bubble(agreed: Agreed, mesh: Mesh, device: torch.device) -> list[float] | None:
    """Return the share of the actions' time that each rank of pp waited, the mean over the other axes.

    The time is that of the slowest rank. So the waits of ranks that end earlier count.

    Args:
        agreed: the times of all ranks.
        mesh: the ranks.
        device: of the model.

    Returns:
        By rank of pp; `None` without pp, without a microbatch, and on CUDA, where the host does not wait.
    """
    lasted_s = max(agreed.lasted_s)
    if mesh.pp.size == 1 or device.type == "cuda" or not lasted_s:
        return None
    # pp is the outermost axis: its ranks are blocks of consecutive ones.
    length = len(agreed.busy_s) // mesh.pp.size
    return [
        1 - fmean(agreed.busy_s[first : first + length]) / lasted_s
        for first in range(0, len(agreed.busy_s), length)
    ]
