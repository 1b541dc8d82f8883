"""Sends many tensors in few messages: each message costs one or two round trips, however small it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

# Large enough that latency does not matter, small enough that the copies of a bucket need little memory.
_BUCKET_BYTES = 32 << 20


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Overwrite tensors with those of one rank of the group; collective.

    Tensors of one dtype and device travel together, up to 32 MiB at a time. A larger tensor travels alone.

    Args:
        tensors: of the same shapes, dtypes and order on every rank.
        group: the ranks; all of them by default.
        source: the rank in the group.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    for bucket in _fill_buckets(tensor.detach() for tensor in tensors):
        is_copied = len(bucket) > 1 or not bucket[0].is_contiguous()
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]) if is_copied else bucket[0].view(-1)
        # As bytes, which every library sends.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
        if is_copied and group.rank() != source:
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _fill_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in buckets of one dtype and device each; leave out empty ones."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if key in filling and sizes[key] + size > _BUCKET_BYTES:
            yield filling.pop(key)
            sizes[key] = 0
        filling.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + size
    yield from filling.values()
