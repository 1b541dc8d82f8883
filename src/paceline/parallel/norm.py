"""Measures the norm of a gradient whose parts are on several ranks.

torch's own `clip_grad_norm_` fails if parameters are on different meshes. Here every rank sums the squares of
its parts. Tensors that tp or dp_shard leaves whole are counted only on the first rank of that axis. One small
collective adds the sums.

With the exact reduction the norm must have the same bits for any division of rows over dp_shard, or of
experts over ep. So it is computed from the norms of single rows, which no rank divides, in the order of the
whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from paceline.comm.one_tensor import gather_rows
from paceline.mesh import Mesh
from paceline.parallel.placement import Placement, local
from paceline.torch_seams.operators import measure_norms

Named = Sequence[tuple[str, Tensor | None]]
# Divides by whole rows, as dp_shard does.
_EP = "ep"
# Numbers whose norms one kernel computes on a device.
_BLOCK = 1 << 20


def measure_norm(
    gradients: Named, parameters: Sequence[Tensor], placement: Placement, mesh: Mesh | None, *, exact: bool
) -> Tensor:
    """Return the global 2-norm, a scalar on the mesh's device; the same on every rank of a copy.

    Collective over dp_shard and tp if they are larger than 1: a number per rank, and with `exact` under
    dp_shard a number per row of every gradient.

    Args:
        gradients: by full name, reduced; `None` counts as zero.
        parameters: theirs, in the same order.
        mesh: the ranks, or `None` for one.
        exact: whether the bits must not depend on dp_shard.
    """
    # Ranks exchange numbers on this device; offloaded parameters are elsewhere.
    device, dtype = parameters[0].device if mesh is None else mesh.device, parameters[0].dtype.to_real()
    if exact:
        squares = _add_rows(gradients, parameters, placement, mesh, device)
    elif mesh is None or not placement.is_divided:
        return _norm_of_all([gradient for _, gradient in gradients], dtype, device)
    else:
        squares = _add_own_squares(gradients, placement, device)
        squares = gather_rows(squares.reshape(1), mesh.model.group).sum()
    return squares.sqrt()


def _add_own_squares(gradients: Named, placement: Placement, device: torch.device) -> Tensor:
    """Return the sum of squares of what this rank counts."""
    counted = [
        local(gradient)
        for name, gradient in gradients
        if gradient is not None and placement.counts(name, gradient)
    ]
    counted = [gradient for gradient in counted if gradient.numel()]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    return get_total_norm(counted).to(device, non_blocking=True).double().square()


def _norm_of_all(gradients: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the norm of gradients that this rank has whole.

    Gradients that no microbatch of this rank reached count as zero. Without them, the list of norms would be
    shorter than on a rank where DDP has filled them in, and a shorter list is summed in another order.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros((), device=device)
    if len(present) == len(gradients):
        return get_total_norm(present).to(device, non_blocking=True)
    norms = iter(norm.to(device, non_blocking=True) for norm in measure_norms(present))
    zero = torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([zero if gradient is None else next(norms) for gradient in gradients])
    norm: Tensor = torch.linalg.vector_norm(stacked)
    return norm


def _add_rows(
    gradients: Named,
    parameters: Sequence[Tensor],
    placement: Placement,
    mesh: Mesh | None,
    device: torch.device,
) -> Tensor:
    """Return the sum of squares in an order that only tp may change."""
    # A weight on several stages counts on the first of them.
    counted = [g if placement.is_on_first_stage(name) else None for name, g in gradients]
    measured = [_measure_rows(g, p, device) for g, p in zip(counted, parameters, strict=True)]
    rows = [row.to(device, non_blocking=True) for row in measured]  # those of offloaded gradients
    if mesh is not None and mesh.dp_shard.size > 1:
        # Replaces the rows of a shard that a rank has; a whole tensor has all of its rows already.
        shards = [place for place, p in enumerate(parameters) if isinstance(p, DTensor)]
        totals = [_count_rows(parameters[place]) for place in shards]
        ordered = _order_rows([rows[place] for place in shards], totals, mesh) if shards else []
        for place, whole in zip(shards, ordered, strict=True):
            rows[place] = whole
    rows = _join_experts(gradients, rows, placement)
    if mesh is not None and placement.holders:
        rows = _fill_in_stages(rows, mesh)
    # By the axis whose ranks hold the parts of a split tensor; the empty name has those that no split cuts.
    by_axis: dict[str, list[Tensor]] = {}
    for (name, _), own in zip(gradients, rows, strict=True):
        split = placement.splits.get(name)
        # The rows of experts are whole by now.
        by_axis.setdefault("" if split is None or split.axis == _EP else split.axis, []).append(own)
    total = _add_squares(by_axis.pop("", []), device)
    for name in sorted(by_axis):
        assert mesh is not None
        axis, own = mesh.axes[name], _add_squares(by_axis[name], device)
        total = gather_rows(own.reshape(1), axis.group).sum() + total
    return total


def _join_experts(gradients: Named, rows: list[Tensor], placement: Placement) -> list[Tensor]:
    """Return the rows with those of all experts, from this rank's; one collective over ep."""
    divided = [
        place
        for place, (name, _) in enumerate(gradients)
        if name in placement.splits and placement.splits[name].axis == _EP
    ]
    if not divided:
        return rows
    own = [rows[place] for place in divided]
    # All ranks have as many rows, because experts are equal and divided equally.
    parts = [torch.split(part, list(map(len, own))) for part in placement.gather(torch.cat(own), _EP)]
    joined = dict(zip(divided, map(torch.cat, zip(*parts, strict=True)), strict=True))
    return [joined.get(place, row) for place, row in enumerate(rows)]


def _count_rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _fill_in_stages(rows: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Return all rows, from those of this rank's stages and zeros for the others'; one collective over pp.

    One rank has each row, so the sum is exact.
    """
    lengths = [len(row) for row in rows]
    whole = torch.cat([row.double() for row in rows])
    dist.all_reduce(whole, group=mesh.pp.group)
    parts = torch.split(whole, lengths)
    return [part.to(row.dtype) for part, row in zip(parts, rows, strict=True)]


def _measure_rows(gradient: Tensor | None, parameter: Tensor, device: torch.device) -> Tensor:
    """Return the norm of each row that this rank has."""
    if gradient is None:
        return torch.zeros(_count_rows(local(parameter)), dtype=parameter.dtype.to_real(), device=device)
    rows = local(gradient)
    if rows.dim() < 2:
        return rows.abs().reshape(-1) if rows.is_complex() else rows.reshape(-1)
    rows = rows.flatten(1)
    if rows.device.type == "cpu" or not rows.numel():
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    # On CUDA the order within a row depends on the number of rows and on where a row begins in memory. In
    # blocks of one shape, whose rows begin at multiples of 16 numbers, it depends on the length alone.
    num_rows = max(1, _BLOCK // rows.shape[1])
    block = rows.new_zeros(num_rows, -(-rows.shape[1] // 16) * 16)
    found = []
    for part in torch.split(rows, num_rows):
        block[: len(part), : rows.shape[1]] = part
        found.append(torch.linalg.vector_norm(block, dim=1)[: len(part)])
    return torch.cat(found)


def _order_rows(rows: list[Tensor], totals: list[int], mesh: Mesh) -> list[Tensor]:
    """Return per tensor the numbers of all rows, from those that this rank has of each."""
    num_ranks = mesh.dp_shard.size
    most = [-(-total // num_ranks) for total in totals]  # rows of a rank; the last ranks may have fewer
    own = rows[0].new_zeros(sum(most))
    for start, part in zip(_starts(most), rows, strict=True):
        own[start : start + len(part)] = part
    gathered = gather_rows(own, mesh.dp_shard.group)
    return [
        gathered[:, start : start + count].reshape(-1)[:total]
        for start, count, total in zip(_starts(most), most, totals, strict=True)
    ]


def _starts(lengths: list[int]) -> list[int]:
    starts, start = [], 0
    for length in lengths:
        starts.append(start)
        start += length
    return starts


def _add_squares(rows: list[Tensor], device: torch.device) -> Tensor:
    if not rows:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(rows).double().square().sum()
