"""Sums the gradients of a model in the buckets of DDP, in an order that does not depend on the ranks.

Protocol of one step, on every rank:

1. `begin` with the number of microbatches that each rank owns.
2. After the backward of every microbatch but the last, `set_aside`: it moves the gradients from the
   parameters and adds them to those with which they complete a subtree. (DDP's own accumulation goes from
   left to right.)
3. The last backward synchronises: per bucket of DDP, `reduce_bucket` adds the earlier gradients, then sums
   those of all ranks into the bucket. In a world of one there are no buckets: the last microbatch is set
   aside too.
4. `end`, which in a world of one stores the sum in the parameters.

Order of the collectives: the thread that runs backward issues all collectives of a bucket before the first
of the next, in DDP's order, on a group of its own. If callbacks chained the collectives instead, two ranks
might issue the second half of one bucket and the first half of the next in different orders, and receive each
other's data without any error. On CUDA they are on a stream of their own, beside backward; on CPU backward
waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.residuals import RowRange
from paceline.comm.tree_exchange import nothing_like
from paceline.parallel.compress import Compression
from paceline.parallel.sums.gradient_sum import GradientSum, RankSum
from paceline.parallel.sums.gradients import (
    Gradients,
    add_gradients,
    flatten,
    list_present,
    take_gradients,
    view_bucket,
)


@dataclass(frozen=True)
class _Bucket:
    """A bucket that is not yet summed: its parameters, views of their gradients, and the earlier ones.

    Where there are no earlier ones, one view has the gradients of all parameters.
    """

    parameters: list[Tensor]
    views: list[Tensor]
    total: GradientSum


class BucketSums:
    """The gradients of one model, summed in the order of the tree, and compressed if asked for.

    Collective: every rank of the group must construct it and run the same buckets.

    Args:
        group: the ranks, used for nothing else; `None` in a world of one.
        apart: parameters whose gradients are summed elsewhere.

    Attributes:
        ranks: the sum over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        apart: Sequence[Tensor] = (),
        compression: Compression | None = None,
    ) -> None:
        others = {id(parameter) for parameter in apart}
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in others]
        self._parameters = [p for _, p in named]
        self._names = [name for name, _ in named]
        self._places = {id(p): place for place, (_, p) in enumerate(named)}
        self.ranks = RankSum(group, device, is_exact=True, compression=compression)
        self._sum = GradientSum(self.ranks, list_present)
        self._num_leaves = 0
        self._last_leaf: int | None = None
        self._stream = torch.cuda.Stream() if group is not None and device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per rank of the group, the number of microbatches that it computes, numbered
                consecutively.
        """
        self._sum.begin(num_owned)
        self._num_leaves = sum(num_owned)
        before, own = sum(num_owned[: self.ranks.rank]), num_owned[self.ranks.rank]
        self._last_leaf = before + own - 1 if own else None

    @torch.no_grad()
    def set_aside(self, index: int) -> None:
        """Move the gradients of microbatch `index` from the parameters to the sum."""
        self._sum.add(index, take_gradients(self._parameters))

    def is_used(self, parameter: Tensor) -> bool:
        """Return whether a microbatch that was set aside in this step has given a parameter a gradient."""
        return self._sum.has(self._places[id(parameter)])

    def fill_missing(self) -> None:
        """Add a zero gradient to all parameters, before a last microbatch that may leave some out.

        DDP requires one for every parameter that an earlier microbatch has used.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = nothing_like(parameter)

    @torch.no_grad()
    def end(self, *, reduced: bool) -> None:
        """End a global batch.

        Args:
            reduced: whether the last microbatch was reduced over ranks; if not, the sum of all gradients that
                were set aside is stored in the parameters.
        """
        values, self._num_leaves = self._sum.take(), 0
        found = [gradients for gradients in values if gradients is not None]
        if reduced or not found:
            return
        if self.ranks.slots is not None and self.ranks.group is None:
            found = [self._sum_slots_alone(values)]
        # Several remain only if the other ranks' are left out on purpose (`Replica.silenced`).
        *others, total = found
        for gradients in reversed(others):
            total = add_gradients(gradients, total)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket with the earlier gradients, and over ranks; called by DDP's hook."""
        buffer = bucket.buffer()
        if not self._num_leaves:
            # DDP's first pass over the graph, or a global batch without samples: zeros everywhere.
            return complete_future(buffer)
        parameters = bucket.parameters()

        def pack(gradients: Gradients) -> list[Tensor]:
            if gradients[0] is views[0]:
                return [buffer]
            return [torch.cat([flatten(g, p) for g, p in zip(gradients, parameters, strict=True)])]

        part = self._sum.pick([self._places[id(parameter)] for parameter in parameters], pack)
        # Nothing is added to the gradients of a single microbatch before they travel.
        is_single = self.ranks.slots is None and not any(part.list_values())
        views: list[Tensor] = [buffer] if is_single else view_bucket(buffer, parameters)
        one = _Bucket(parameters, views, part)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        # Without a stream, torch would start CUDA on a machine that has it.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self.ranks.slots is not None:
                self._sum_slots(one)
            else:
                self._sum_bucket(one)
            return complete_future(buffer)

    # ---- work on buckets

    @torch.no_grad()
    def _sum_bucket(self, bucket: _Bucket) -> None:
        if self._last_leaf is not None:
            bucket.total.add(self._last_leaf, list(bucket.views))
        bucket.total.finish(list(bucket.views))

    @torch.no_grad()
    def _sum_slots(self, bucket: _Bucket) -> None:
        if self._last_leaf is not None:
            bucket.total.add(self._last_leaf, list(bucket.views))
        missing: Gradients = [None] * len(bucket.views)
        slots = [missing if each is None else each for each in bucket.total.take()]
        self._encode(bucket.parameters, slots, bucket.views)

    def _sum_slots_alone(self, slots: list[Gradients | None]) -> Gradients:
        """Return the sum of this process's slots, one parameter after the other."""
        sums: Gradients = []
        for place, parameter in enumerate(self._parameters):
            found = [None if gradients is None else gradients[place] for gradients in slots]
            total = torch.zeros_like(parameter)
            self._encode([parameter], [[gradient] for gradient in found], [total])
            sums.append(None if all(gradient is None for gradient in found) else total)
        return sums

    def _encode(
        self,
        parameters: Sequence[Tensor],
        slots: Sequence[Gradients],
        totals: Sequence[Tensor],
    ) -> None:
        """Sum the gradients of some parameters over the slots of all ranks; collective.

        Args:
            parameters: the same on every rank.
            slots: per own slot, their gradients; may be `totals`.
            totals: of the shapes of the parameters; receive the sums.
        """
        kept = [place for place, parameter in enumerate(parameters) if parameter.numel()]
        names = [self._names[self._places[id(parameters[place])]] for place in kept]
        pieces = [RowRange.all_of(n, parameters[p].shape) for n, p in zip(names, kept, strict=True)]
        if not pieces:
            return

        def read(values: Gradients) -> Gradients:
            found = [values[place] for place in kept]
            return [
                None if value is None else value.reshape(piece.num_rows, piece.length)
                for piece, value in zip(pieces, found, strict=True)
            ]

        sums = [torch.empty(piece.num_rows, piece.length, device=totals[0].device) for piece in pieces]
        assert self.ranks.slots is not None
        assert self.ranks.compression is not None
        given = [read(values) for values in slots]
        self.ranks.slots.sum(pieces, given, sums, self.ranks.compression.factor)
        for place, total in zip(kept, sums, strict=True):
            totals[place].copy_(total.view(totals[place].shape))


def complete_future(total: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future of a tensor that is complete, on CUDA once the current stream has finished."""
    future: torch.futures.Future[Tensor]
    future = torch.futures.Future(devices=[total.device] if total.is_cuda else [])
    future.set_result(total)
    return future
