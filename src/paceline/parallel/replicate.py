"""Replication: every rank holds the model, and gradients are summed over `dp_replicate`.

Protocol of one optimizer step, on every rank of the group:

1. All microbatches but the last run on the plain model: their gradients are summed locally.
2. `backward` of the last one: DDP sums one bucket after another over the ranks while it is still computing
   earlier layers. That is the only round of gradient traffic per step. The fast reduction is the library's
   all-reduce; for the exact one see `sums/buckets.py`.
   A microbatch may leave parameters out. After its backward they get a gradient of -0.0, which changes no bit
   of a sum and makes their buckets complete.
3. A rank whose gradients are computed already, or that owns no microbatch, calls `send()`: a loss that gives
   every parameter a gradient of -0.0, so that it joins the same all-reduces.

DDP never sees the model's forward. Its own forward gets the loss alone, which is all that it needs to expect
gradients.

The model alone determines which gradients share a bucket, never the course of a step: see `_show_graph`.

Gradients are *summed*, not averaged: the caller divides by the global weight, which it knows.

Built on `torch.nn.parallel.DistributedDataParallel` (Li et al. 2020, https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.mesh import Axis
from paceline.parallel.sums.buckets import BucketSums, complete_future
from paceline.torch_seams.modules import hide_from_ddp

# torch 2.13 renamed it and deprecates the old name.
_BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class _Reach(torch.autograd.Function):
    """A node that passes a number on; in backward, it gives a parameter a gradient of one value."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.value = value
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.saved_tensors[0], ctx.value), None


def _note_reached(reached: set[int], place: int, *_: Any) -> None:
    reached.add(place)


def _zero_loss(parameters: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Return zero, with a gradient of `value` for each parameter; the last gets it first, as in most."""
    zero = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        zero = _Reach.apply(zero, parameter, value)  # type: ignore[no-untyped-call]
    return zero


class LossModule(nn.Module):
    """The parameters of a model for DDP, and a forward that passes the loss on."""

    def __init__(self, model: nn.Module, apart: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.model = model
        others = {id(parameter) for parameter in apart}
        self.trained = [p for p in model.parameters() if p.requires_grad and id(p) not in others]
        named = self.named_parameters(remove_duplicate=False)
        hide_from_ddp(self, [name for name, p in named if id(p) in others])

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss


@dataclass(frozen=True)
class ReplicaSettings:
    """The settings of `DistributedDataParallel`; the recipe's `[ddp]` explains each.

    They change speed, not the result.
    """

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True


class Replica:
    """A model whose gradients are summed over the ranks of a mesh axis.

    Collective: every rank of the axis must construct it, and run the same number of synchronising
    backwards. Its ranks hold the same values already.

    Args:
        model: the model, on its device, in its final dtype, with parameters to train.
        settings: DDP's settings.
        exact: sums the buckets in place of the library's all-reduce.
        apart: parameters that differ between the ranks; their gradients are summed elsewhere.

    Attributes:
        group: the ranks that hold copies.
        silent: whether backwards reduce nothing at the moment, see `silenced`.
        trained: the parameters whose gradients are summed here.
        left_out: the parameters that the last reducing backward has left out and that no earlier one of the
            step has given a gradient.

    Communication: one all-reduce of the gradients per synchronising backward, 2(n-1)/n times their
    bytes per rank on a ring of n; for the exact reduction see `comm/tree_exchange.py`.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        settings: ReplicaSettings,
        exact: BucketSums | None = None,
        apart: Sequence[Tensor] = (),
    ) -> None:
        self._loss_module = LossModule(model, apart)
        self.group = axis.group
        self._exact = exact
        self.silent = False
        self.last_bucket_launched = False
        self.left_out: list[Tensor] = []
        self.trained = self._loss_module.trained
        # With a search for unused parameters DDP completes buckets itself.
        self._completes = not settings.find_unused_parameters
        self._reached: set[int] = set()
        self._nodes = [get_gradient_edge(p).node for p in self.trained] if self._completes else []
        for place, node in enumerate(self._nodes):
            # Not the versions of gradients: those in one bucket of DDP share a version.
            node.register_hook(partial(_note_reached, self._reached, place))
        self._before_last_bucket: Callable[[], None] | None = None
        self._last_launch_s = self._waited_s = 0.0
        self._is_showing = False
        self._ddp = DistributedDataParallel(
            self._loss_module,
            process_group=self.group,
            **{_BUFFERS_ARGUMENT: False},  # type: ignore[arg-type]
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            init_sync=False,
        )
        # A weak reference, because this object holds DDP, and DDP its hook where Python's garbage collector
        # does not look. A lambda, because DDP compares annotations with types, and here they are strings.
        replica = ref(self)
        self._ddp.register_comm_hook(None, lambda _, bucket: replica()._reduce_bucket(bucket))  # type: ignore[union-attr]
        if not settings.find_unused_parameters:  # with it, DDP neither orders buckets nor keeps a graph
            self._show_graph()
            # DDP's next forward orders its buckets, which waits for all ranks and moves the gradients that
            # there are: neither must happen in a step, where ranks may wait for each other inside of that
            # forward, and a gradient that has moved looks like one that backward has added to.
            with self._ddp.no_sync():
                self._ddp(_zero_loss(self.trained))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Reduce nothing inside the context: for timing compute alone. Each rank keeps its own gradients."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def backward(self, loss: Tensor, before_last_bucket: Callable[[], None] | None = None) -> float:
        """Run backward, and sum the gradients over ranks during it.

        Under CUDA the host does not wait in backward, so the result is 0 there.

        Args:
            loss: of this rank's last microbatch.
            before_last_bucket: called when all gradients of this rank are computed, before the last of them
                are sent.

        Returns:
            The seconds that it waited for communication: after the last gradient, and with the exact
            reduction on CPU in each bucket.
        """
        self.left_out = []
        self._reached.clear()
        return self._reduce(loss, before_last_bucket, completes=self._completes)

    def send(self, before_last_bucket: Callable[[], None] | None = None) -> float:
        """Sum the gradients over ranks as they are; arguments and result as for `backward`."""
        self.left_out = [p for p in self.trained if p.grad is None]
        return self._reduce(_zero_loss(self.trained, -0.0), before_last_bucket, completes=False)

    def _reduce(
        self, loss: Tensor, before_last_bucket: Callable[[], None] | None, *, completes: bool
    ) -> float:
        self._last_launch_s, self._waited_s, self.last_bucket_launched = 0.0, 0.0, False
        self._before_last_bucket = before_last_bucket
        self._ddp(loss).backward()
        if completes and not self.last_bucket_launched:
            self._complete()
        self._before_last_bucket = None
        if not self._last_launch_s or loss.is_cuda:
            return 0.0
        return self._waited_s + time.perf_counter() - self._last_launch_s

    def _complete(self) -> None:
        """Add zero gradients for the parameters that backward has left out, because DDP waits for them."""
        missing = [p for place, p in enumerate(self.trained) if place not in self._reached]
        self.left_out = [p for p in missing if p.grad is None]
        if missing:
            _zero_loss(missing, -0.0).backward()  # type: ignore[no-untyped-call]

    def _show_graph(self) -> None:
        """Run one backward of zeros, in which every parameter is used once, the last one first.

        DDP assigns parameters to buckets again after the first backward. Without this backward, the first
        step of a start would be reduced in other buckets than the same step of an uninterrupted run. On three
        and more ranks sums in a ring would then have other last bits.
        """
        self._is_showing = True
        self.send()
        self._is_showing = False
        for parameter in self._loss_module.parameters():
            parameter.grad = None

    def _reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._last_launch_s = time.perf_counter()
        if bucket.is_last():
            self.last_bucket_launched = True
            if self._before_last_bucket is not None:
                self._before_last_bucket()
        if self._exact is not None:
            future = self._exact.reduce_bucket(bucket)
            if not bucket.is_last():  # the time after the last launch counts anyway
                self._waited_s += time.perf_counter() - self._last_launch_s
            return future
        if self._is_showing:  # zeros on every rank
            return complete_future(bucket.buffer())
        return sum_bucket(bucket, self.group)


def sum_bucket(bucket: GradBucket, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over the ranks of a group, by the library."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return reduced
