"""`Split`: a division of one dimension of a tensor over an axis, and its inverse.

A parameter may be divided twice: over tp by a `Split` of one of its dimensions (each rank then holds a plain
tensor, its own part), and that part over dp_shard as torch's DTensor, by rows. Everything else is the same on
all ranks. Checkpoints, gradient hooks and `verify` see full names and whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.torch_seams.modules import own_buffers, own_parameters


@dataclass(frozen=True)
class Split:
    """One dimension of a tensor, divided over an axis of the layout.

    The dimension is seen as [outer, n, inner], and n is divided into equal runs. A plain column or row split
    has outer 1 (Megatron-LM, Shoeybi et al. 2019, section 3); queries, keys and values packed into one
    matrix have outer 3, so that each rank holds its heads of all three.

    Attributes:
        dim: the dimension, not negative.
        outer: how often the divided part repeats.
        num_ranks: degree of the axis.
        axis: the axis of the layout whose ranks hold the parts.
    """

    dim: int
    outer: int
    num_ranks: int
    axis: str = "tp"

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a rank of the axis: a contiguous copy."""
        size = whole.shape[self.dim]
        assert size % (self.outer * self.num_ranks) == 0, (tuple(whole.shape), self)
        folded = _fold(whole, self.dim, (self.outer, self.num_ranks, -1))
        part = folded.select(self.dim + 1, rank)
        return part.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, from the parts of all ranks of the axis in their order."""
        assert len(parts) == self.num_ranks
        folded = [_fold(part, self.dim, (self.outer, -1)) for part in parts]
        return torch.stack(folded, self.dim + 1).flatten(self.dim, self.dim + 2)

    def runs(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Return the indices that a rank has of the dimension, as runs (start, stop) of the whole.

        Args:
            size: of the whole dimension.
        """
        inner = size // (self.outer * self.num_ranks)
        starts = [(number * self.num_ranks + rank) * inner for number in range(self.outer)]
        return [(start, start + inner) for start in starts]

    def whole_shape(self, part: Sequence[int]) -> list[int]:
        """Return the shape of the whole tensor, from that of a part."""
        return [size * (self.num_ranks if dim == self.dim else 1) for dim, size in enumerate(part)]


def take_parts(model: nn.Module, splits: Mapping[str, Split], rank: int) -> None:
    """Replace the divided parameters and buffers of a model by a rank's parts, in place.

    Args:
        model: whole, or on meta.
        splits: by full name; tied names each.
        rank: of the axis over which all of them are split.
    """
    taken: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for store in (own_parameters(module), own_buffers(module)):
            for key, tensor in store.items():
                split = splits.get(f"{prefix}.{key}" if prefix else key)
                if split is None or tensor is None:
                    continue
                if id(tensor) not in taken:
                    part = split.take(tensor.detach(), rank)
                    if isinstance(tensor, nn.Parameter):
                        part = nn.Parameter(part, requires_grad=tensor.requires_grad)
                    taken[id(tensor)] = part
                    taken[id(part)] = part  # reached again if a module has several names
                store[key] = taken[id(tensor)]


def _fold(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    folded: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return folded
