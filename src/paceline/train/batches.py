"""Batches that are not from a loader of ours, and the weight of a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.data.share import Share, split_microbatches
from paceline.errors import PacelineError
from paceline.world import World


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


def weigh(loss: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """What a loss function returned, as (sum of losses, weight).

    A pair is that already; a scalar is the mean over the microbatch's samples.

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
            saw=f"the loss function returned a {type(total).__name__}{shape}.",
            rule="A loss is a pair of scalars (sum of losses, weight), or one scalar: the mean over samples.",
            fix="Return for example (losses.sum(), losses.numel()).",
        )
    return total, weight


def share_batch(batch: Any, world: World, microbatch_size: int | None) -> Share:
    """This rank's samples as its share of a global batch made of all ranks' samples; collective.

    Microbatches and samples are numbered through in the order of ranks. Costs one all-reduce of 8 bytes
    per rank.
    """
    num_samples = count_samples(batch)
    counts = [num_samples]
    if world.world_size > 1:
        all_counts = torch.zeros(world.world_size, dtype=torch.int64, device=world.device)
        all_counts[world.rank] = num_samples
        dist.all_reduce(all_counts)
        counts = all_counts.tolist()
    cuts = [split_microbatches(count, microbatch_size or max(1, count)) for count in counts]
    first = sum(len(cut) for cut in cuts[: world.rank])
    first_sample = sum(counts[: world.rank])
    return Share(
        epoch=0,
        number=0,
        num_samples=sum(counts),
        num_owned=tuple(map(len, cuts)),
        microbatches=[
            (first + number, _cut_samples(batch, start, stop))
            for number, (start, stop) in enumerate(cuts[world.rank])
        ],
        samples=[range(first_sample + start, first_sample + stop) for start, stop in cuts[world.rank]],
    )


def _cut_samples(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop] if tensor.dim() else tensor, batch)
