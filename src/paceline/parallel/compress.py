"""Compressed reduction: the gradients of slots are summed in fewer bytes.

It is an exact reduction in which slots, not microbatches, are what is added over ranks: see `comm/slots.py`
for the protocol. Microbatches of a slot are added on its rank, in the order of a tree of their own. If
several ranks share a slot, each adds its own as far as that order allows.

Residuals have the units of the gradient of the sum of losses: before encoding, gradients are multiplied by
the unit and divided by the loss scale, both powers of two, which change from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.codec import build_codec
from paceline.comm.exchange import Exchange
from paceline.comm.low_rank import LowRankSum, is_low_rank
from paceline.comm.residuals import Residuals, RowRange
from paceline.comm.slot_ranks import count_sharing, list_own_slots
from paceline.comm.slots import SlotSum
from paceline.comm.tree import ReductionPlan, TreeSum, plan_reduction
from paceline.data.share import count_owned, owned_microbatches
from paceline.errors import PacelineError
from paceline.parallel.exact import (
    DDP_BUCKET_BYTES,
    ExactReduction,
    Gradients,
    add_gradients,
    complete_future,
    view_gradients,
)

Value = TypeVar("Value")
Missing = TypeVar("Missing")


@dataclass(frozen=True)
class CompressSettings:
    """The settings of the compression; the recipe's `[compress]` explains each.

    Attributes:
        kind: of the codec.
        slots: their number.
        after_steps: number of steps that are not compressed.
        density: share of the numbers that `topk` keeps; `None` for other kinds.
        rank: columns of the thin matrices that `powersgd` sends; `None` for other kinds.
    """

    kind: str
    slots: int
    after_steps: int = 0
    density: float | None = None
    rank: int | None = None


class SumOfSlots(Protocol):
    """A way to sum the compressed gradients of all slots.

    Attributes:
        sent_bytes: what this rank has sent to others so far.
    """

    @property
    def sent_bytes(self) -> int: ...

    def sum(
        self,
        shards: Sequence[Sequence[RowRange]],
        slots: Sequence[Sequence[Sequence[Tensor | None]]],
        totals: Sequence[Tensor],
        factor: float,
        plan: ReductionPlan | None = None,
    ) -> None:
        """Sum the slots of all ranks, as `SlotSum.sum` does; collective."""


@dataclass(frozen=True)
class OwnSlots:
    """The slots whose microbatches a rank computes, in one global batch.

    Attributes:
        leaves: the microbatches of each, also those of other ranks.
        plan: the microbatches of the only one by the ranks that share it; `None` if ranks have whole slots.
    """

    leaves: tuple[range, ...] = ()
    plan: ReductionPlan | None = None

    def list_values(self, trees: Sequence[TreeSum[Value]], missing: Missing) -> list[Value | Missing]:
        """Return what `SlotSum.sum` takes: a value per slot, or per own subtree of a shared slot."""
        if self.plan is not None:
            return [value for tree in trees for _, value in tree.subtrees]
        return [tree.subtrees[0][1] if tree.subtrees else missing for tree in trees]


class Compression:
    """The compression of one model's gradients on this rank.

    Attributes:
        settings: of the run.
        residuals: of this rank.
        is_on: whether the gradients of the current step are compressed.
        factor: by which the gradients of the current step are multiplied before they are encoded.

    Args:
        settings: of the run.
        model: its parameters to train.

    Raises:
        PacelineError: PL961 for parameters that are not fp32, PL964 if `rank` suits no parameter.
    """

    def __init__(self, settings: CompressSettings, model: nn.Module) -> None:
        self.settings = settings
        self.residuals = Residuals()
        self.is_on = False
        self.factor = 1.0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise PacelineError(
                    "PL961",
                    saw=f'compress.kind="{settings.kind}" for {name}, a parameter of {parameter.dtype}.',
                    rule="Codecs encode gradients of fp32 parameters.",
                    fix='Use dtype "fp32", "bf16" or "fp16", which all keep fp32 parameters, or '
                    'compress.kind="none".',
                )
        if settings.rank is not None:
            _check_rank(settings.rank, model)

    @property
    def is_at_once(self) -> bool:
        """Whether all gradients of the model are summed together, because a sum takes several exchanges."""
        return self.settings.rank is not None

    def build_sum(
        self, group: dist.ProcessGroup | None, exchange: Exchange | None, num_shards: int = 1
    ) -> SumOfSlots:
        """Return the sum over the slots of all ranks.

        Args:
            group: the ranks, used for nothing else at the same time; `None` in a world of one.
            exchange: sums over them; `None` in a world of one.
            num_shards: ranks that share a parameter's rows.
        """
        settings = self.settings
        if settings.rank is None:
            codec = build_codec(settings.kind, settings.density)
            return SlotSum(codec, settings.slots, self.residuals, group, num_shards)
        return LowRankSum(
            settings.rank,
            settings.slots,
            self.residuals,
            exchange,
            group,
            num_shards,
        )

    def begin(self, step: int, factor: float) -> None:
        """Start a step.

        Args:
            step: its number, from 1.
            factor: turns its gradients into those of the sum of losses; a power of two.
        """
        self.is_on = step > self.settings.after_steps
        self.factor = factor

    def settle(self, *, keep: bool) -> None:
        """End a step; without `keep` its residuals are dropped, because it was skipped."""
        self.residuals.settle(keep=keep)
        self.is_on = False

    def cut(self, num_owned: tuple[int, ...], rank: int) -> OwnSlots:
        """Return the slots of a rank.

        Args:
            num_owned: per rank, the number of microbatches that it computes.
            rank: the rank.

        Raises:
            PacelineError: PL963 if the ranks' microbatches are not those of their slots.
        """
        num_slots, num_ranks = self.settings.slots, len(num_owned)
        expected = count_owned(sum(num_owned), num_ranks, num_slots)
        if num_owned != expected:
            error = PacelineError(
                "PL963",
                saw=f"{sum(num_owned)} microbatches, of which the ranks have {list(num_owned)}, and "
                f"compress.slots={num_slots}.",
                rule="Slots are equal blocks of consecutive microbatches, and each rank has the microbatches "
                f"of its slots, or its part of one: here {list(expected)}.",
                fix="Use trainer.loader(), or give every rank the same number of microbatches per slot.",
            )
            error.on_every_rank = True
            raise error
        slots = list_own_slots(num_slots, num_ranks, rank)
        leaves = tuple(owned_microbatches(sum(num_owned), num_slots, slot) for slot in slots)
        sharing = count_sharing(num_slots, num_ranks)
        first = rank // sharing * sharing
        plan = plan_reduction(num_owned[first : first + sharing]) if sharing > 1 else None
        return OwnSlots(leaves, plan)


def _check_rank(rank: int, model: nn.Module) -> None:
    """Raise PL964 if no parameter would be sent as thin matrices."""
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    pieces = [RowRange.all_of(name, shape) for name, shape in shapes.items()]
    if any(is_low_rank(piece.num_rows, piece.length, rank) for piece in pieces):
        return
    most = max((p.num_rows * p.length // (2 * (p.num_rows + p.length)) for p in pieces), default=0)
    largest = max(pieces, key=lambda p: min(p.num_rows, p.length), default=None)
    found = "" if largest is None else f" {largest.name} is {largest.num_rows} x {largest.length}."
    raise PacelineError(
        "PL964",
        saw=f'compress.kind="powersgd" with compress.rank={rank}, which compresses no parameter.{found}',
        rule="A matrix of n x m is sent as n x rank and m x rank numbers if these are at most half as many.",
        fix=f'Set compress.rank to {most} or less, or use compress.kind="int8".'
        if most
        else 'Use compress.kind="int8", or train uncompressed: this model has no large matrix.',
    )


@dataclass(frozen=True)
class _Bucket:
    """A bucket whose microbatches are not yet added.

    Attributes:
        parameters: in the bucket.
        views: their gradients: those of the last microbatch, and later the sum.
        trees: per own slot, the earlier microbatches on this rank.
    """

    parameters: list[Tensor]
    views: list[Tensor]
    trees: list[TreeSum[Gradients]]


class CompressedReduction(ExactReduction):
    """The gradients of one model, compressed by slots; in the first `after_steps` steps as they are.

    With `powersgd` the last bucket sums all of them, in two exchanges. DDP reads no bucket before that.

    Collective: every rank of the group must construct it and run the same buckets.

    Args:
        model: its parameters to train.
        group: the ranks, used for nothing else; `None` in a world of one.
        device: of the model.
        compression: of the model.
        bucket_bytes: as for `ExactReduction`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        compression: Compression,
        *,
        bucket_bytes: int = DDP_BUCKET_BYTES,
    ) -> None:
        super().__init__(model, group, device, bucket_bytes=bucket_bytes)
        self.compression = compression
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._slot_sum = compression.build_sum(group, self.exchange)
        self._own = OwnSlots()
        self._trees: list[TreeSum[Gradients]] = []
        self._held: list[_Bucket] = []

    def begin(self, num_owned: tuple[int, ...]) -> None:
        super().begin(num_owned)
        self._held = []
        self._own = self.compression.cut(num_owned, self._rank)
        self._trees = [TreeSum(len(leaves), add_gradients) for leaves in self._own.leaves]

    def set_aside(self, index: int) -> None:
        if not self.compression.is_on:
            super().set_aside(index)
            return
        gradients = self._take_gradients()
        for leaves, tree in zip(self._own.leaves, self._trees, strict=True):
            if index in leaves:
                at = index - leaves.start
                tree.push((at, at + 1), gradients)

    def is_used(self, parameter: Tensor) -> bool:
        place = self._places[id(parameter)]
        held = (gradients for tree in self._trees for _, gradients in tree.subtrees)
        return super().is_used(parameter) or any(gradients[place] is not None for gradients in held)

    @torch.no_grad()
    def end(self, *, reduced: bool) -> None:
        trees, self._trees = self._trees, []
        super().end(reduced=reduced)
        if reduced or not self.compression.is_on:
            return
        missing: Gradients = [None] * len(self._parameters)
        slots = self._own.list_values(trees, missing)
        if not any(tree.subtrees for tree in trees):
            return
        for place, parameter in enumerate(self._parameters):
            found = [gradients[place] for gradients in slots]
            total = torch.zeros_like(parameter)
            if self._group is None:
                self._sum_parameters([parameter], [[gradient] for gradient in found], [total])
            else:  # the other ranks' slots are left out on purpose (`Replica.silenced`)
                for gradient in found:
                    if gradient is not None:
                        total += gradient
            is_used = any(gradient is not None for gradient in found)
            parameter.grad = total if is_used else None

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        total = bucket.buffer()
        if not self.compression.is_on or self._plan is None:
            return super().reduce_bucket(bucket)
        if not self._plan.num_leaves:
            return complete_future(total)
        parameters = bucket.parameters()
        places = [self._places[id(parameter)] for parameter in parameters]
        aside: list[Tensor] = []
        trees: list[TreeSum[Gradients]] = []
        for leaves, tree in zip(self._own.leaves, self._trees, strict=True):
            held = [(subtree, [values[place] for place in places]) for subtree, values in tree.subtrees]
            aside += [gradient for _, values in held for gradient in values if gradient is not None]
            trees.append(TreeSum(len(leaves), add_gradients, held))
        buckets = [_Bucket(parameters, view_gradients(total, parameters), trees)]
        if self.compression.is_at_once:
            self._held += buckets
            if not bucket.is_last():
                return complete_future(total)
            buckets, self._held = self._held, []
        last, own = self._last_leaf, self._own

        def work() -> None:
            with torch.no_grad():
                by_bucket = [_finish_slots(one, own, last) for one in buckets]
                self._sum_parameters(
                    [each for one in buckets for each in one.parameters],
                    [[each for values in row for each in values] for row in zip(*by_bucket, strict=True)],
                    [view for one in buckets for view in one.views],
                    own.plan,
                )

        if self._line is not None:
            return self._line.do(work, total) if bucket.is_last() else self._line.submit(work, total)
        if self.compression.is_at_once:
            work()  # on the stream of backward, for which the futures of the earlier buckets are complete
            return complete_future(total)
        return self._run_on_stream(work, total, aside)

    def _sum_parameters(
        self,
        parameters: Sequence[Tensor],
        slots: Sequence[Sequence[Tensor | None]],
        totals: Sequence[Tensor],
        plan: ReductionPlan | None = None,
    ) -> None:
        """Sum the gradients of some parameters over the slots of all ranks; collective.

        Args:
            parameters: the same on every rank.
            slots: per own slot, or own subtree of a shared slot, their gradients; may be `totals`.
            totals: of the shapes of the parameters; receive the sums.
            plan: of the shared slot.
        """
        kept = [place for place, parameter in enumerate(parameters) if parameter.numel()]
        pieces = [RowRange.all_of(self._names[id(parameters[n])], parameters[n].shape) for n in kept]
        if not pieces:
            return

        def flatten(values: Sequence[Tensor | None]) -> list[Tensor | None]:
            found = [values[place] for place in kept]
            return [
                None if value is None else value.reshape(piece.num_rows, piece.length)
                for piece, value in zip(pieces, found, strict=True)
            ]

        sums = [torch.empty(piece.num_rows, piece.length, device=totals[0].device) for piece in pieces]
        given = [[flatten(values)] for values in slots]
        self._slot_sum.sum([pieces], given, sums, self.compression.factor, plan)
        for place, total in zip(kept, sums, strict=True):
            totals[place].copy_(total.view(totals[place].shape))


def _finish_slots(bucket: _Bucket, own: OwnSlots, last: int | None) -> list[Gradients]:
    """Return the gradients of this rank's slots or subtrees, with the last microbatch."""
    for leaves, tree in zip(own.leaves, bucket.trees, strict=True):
        if last is not None and last in leaves:
            at = last - leaves.start
            tree.push((at, at + 1), list(bucket.views))
    missing: Gradients = [None] * len(bucket.views)
    return own.list_values(bucket.trees, missing)
