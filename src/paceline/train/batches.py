"""Batches that are not from a loader of ours, and the weight of a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from paceline.data.share import Share, split_microbatches
from paceline.errors import PacelineError
from paceline.mesh import Axis


def count_samples(batch: Any) -> int:
    """The length of the first dimension of the first tensor in a nest of tensors.

    Raises:
        PacelineError: PL409 where there is no tensor with a first dimension.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise PacelineError(
        "PL409",
        saw=f"a batch of type {type(batch).__name__} without a tensor that has a first dimension.",
        rule="Samples are counted along the first dimension of the first tensor.",
        fix="Make the batch a tensor, or a dict or tuple of tensors, with samples along dimension 0.",
    )


def weigh(loss: Any, batch: Any, *, by: str = "the loss function") -> tuple[Tensor, Tensor]:
    """What a loss function returned, as (sum of losses, weight).

    A pair is that already; a scalar is the mean over the microbatch's samples.

    Args:
        loss: what it returned.
        batch: of which.
        by: who returned it, for the message.

    Raises:
        PacelineError: PL410 for anything else, among it a loss that is not summed up.
    """
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], (Tensor, int, float)):
        total, weight = loss
        if not isinstance(weight, Tensor):
            weight = torch.tensor(float(weight), device=total.device if isinstance(total, Tensor) else None)
    else:
        total = loss
        weight = torch.tensor(float(count_samples(batch)))
        total = total * weight.item() if isinstance(total, Tensor) else total
    if not isinstance(total, Tensor) or total.dim() != 0 or weight.dim() != 0:
        shape = f" of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""
        raise PacelineError(
            "PL410",
            saw=f"{by} returned a {type(total).__name__}{shape}.",
            rule="A loss or metric is a pair of scalars (sum, weight), or one scalar: the mean over samples.",
            fix="Return for example (losses.sum(), losses.numel()).",
        )
    return total, weight


def share_batch(batch: Any, dp: Axis | None, device: torch.device, microbatch_size: int | None) -> Share:
    """This rank's samples as its share of a global batch made of all ranks' samples; collective over dp.

    Microbatches and samples are numbered through in the order of ranks. Costs one all-reduce of 8 bytes
    per rank.

    Args:
        batch: this rank's samples; ranks of tp give the same ones.
        dp: the ranks that have different samples, or `None` for one.
        device: where the collective runs.
        microbatch_size: samples per forward; `None` for all of a rank's at once.
    """
    num_samples = count_samples(batch)
    counts, rank = [num_samples], 0
    if dp is not None and dp.size > 1:
        rank = dp.rank
        all_counts = torch.zeros(dp.size, dtype=torch.int64, device=device)
        all_counts[rank] = num_samples
        dist.all_reduce(all_counts, group=dp.group)
        counts = all_counts.tolist()
    cuts = [split_microbatches(count, microbatch_size or max(1, count)) for count in counts]
    if len(cuts[rank]) > 1:
        _check_lengths(batch, num_samples)
    first = sum(len(cut) for cut in cuts[:rank])
    first_sample = sum(counts[:rank])
    return Share(
        epoch=0,
        number=0,
        num_samples=sum(counts),
        num_owned=tuple(map(len, cuts)),
        microbatches=[
            (first + number, _cut_samples(batch, start, stop))
            for number, (start, stop) in enumerate(cuts[rank])
        ],
        samples=[range(first_sample + start, first_sample + stop) for start, stop in cuts[rank]],
    )


def _check_lengths(batch: Any, num_samples: int) -> None:
    """Raises PL211 where a tensor can't be cut into microbatches along with the others."""
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) != num_samples:
            raise PacelineError(
                "PL211",
                saw=f"batch{keystr(path)} has {len(leaf)} rows, and the first tensor of the batch has "
                f"{num_samples}.",
                rule="Samples lie along the first dimension of every tensor, and all of them are cut into "
                "microbatches alike.",
                fix="Give every field one row per sample, or set microbatch_size to the size of the whole "
                "batch.",
            )


def _cut_samples(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop] if tensor.dim() else tensor, batch)


def lend_batch(share: Share, dp: Axis) -> Any:
    """A microbatch of this global batch for each rank that runs one more forward than it owns microbatches.

    Collective over dp where some rank owns none and another does: those get one that is not theirs.
    """
    if share.microbatches and all(share.num_owned):
        return share.microbatches[0][1]
    lender = next(rank for rank, owned in enumerate(share.num_owned) if owned)
    lent = [share.microbatches[0][1] if dp.rank == lender else None]
    dist.broadcast_object_list(lent, group=dp.group, group_src=lender)
    return share.microbatches[0][1] if share.microbatches else lent[0]
