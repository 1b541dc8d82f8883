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
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.sums.buckets import BucketSums, complete_future
from paceline.torch_seams.modules import hide_from_ddp

# How far the result of a hook may be from the mean in norm and factor: compression rounds.
_SLACK = 0.1
CommHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

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
        comm_hook: a `(state, hook)` as for `DistributedDataParallel.register_comm_hook`. It must
            average over the ranks, which is what torch's own hooks do.
        apart: parameters that differ between the ranks; their gradients are summed elsewhere.

    Attributes:
        group: the ranks that hold copies.
        num_ranks: number of these ranks.
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
        comm_hook: tuple[Any, CommHook] | None = None,
        apart: Sequence[Tensor] = (),
    ) -> None:
        assert exact is None or comm_hook is None
        self._loss_module = LossModule(model, apart)
        self.group = axis.group
        self._exact = exact
        self._averaging_hook: tuple[Any, CommHook] | None = None
        # The factor between a result of the hook and the mean, once a bucket has shown it.
        self._hook_factor: float | None = None
        self.num_ranks = axis.size
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
            node.register_hook(partial(self._note_reached, place))
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
        # A lambda, because DDP compares annotations with types, and here they are strings.
        self._ddp.register_comm_hook(None, lambda _state, bucket: self._reduce_bucket(bucket))
        if not settings.find_unused_parameters:  # with it, DDP neither orders buckets nor keeps a graph
            self._show_graph()
            # DDP's next forward orders its buckets, which waits for all ranks and moves the gradients that
            # there are: neither must happen in a step, where ranks may wait for each other inside of that
            # forward, and a gradient that has moved looks like one that backward has added to.
            with self._ddp.no_sync():
                self._ddp(_zero_loss(self.trained))
        self._averaging_hook = comm_hook

    @property
    def gradient_scale(self) -> float:
        """The factor that turns a reduced gradient into the sum over the ranks."""
        return 1.0 if self._averaging_hook is None else float(self.num_ranks)

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
        if self._hook_factor is not None and abs(self._hook_factor - 1) > _SLACK:
            raise _not_mean_error(self._hook_factor, self.num_ranks)
        if completes and not self.last_bucket_launched:
            self._complete()
        self._before_last_bucket = None
        if not self._last_launch_s or loss.is_cuda:
            return 0.0
        return self._waited_s + time.perf_counter() - self._last_launch_s

    def _note_reached(self, place: int, *_: Any) -> None:
        self._reached.add(place)

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
        if self._averaging_hook is not None:
            state, hook = self._averaging_hook
            mean = None if self._hook_factor is not None else self._average(bucket.buffer())
            future = hook(state, bucket)
            if mean is not None:
                self._hook_factor = _find_factor(future.wait(), mean)
            if not bucket.buffer().is_cuda:
                # gloo runs callbacks in threads of its own, in an order that differs between ranks. Hooks
                # that chain collectives (PowerSGD) on several buckets at once would hang or be mismatched.
                future.wait()
            return future
        if self._is_showing:  # zeros on every rank
            return complete_future(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(_first_tensor)
        return reduced

    def _average(self, gradients: Tensor) -> Tensor:
        total = gradients.to(torch.float64, copy=True)  # the hook gets them as they are
        dist.all_reduce(total, group=self.group)
        return total / self.num_ranks


def _find_factor(result: Tensor, mean: Tensor) -> float | None:
    """Return the factor that a hook's result has to the mean; 1 if it differs otherwise, as compression does.

    Without a gradient that shows it, return `None`.
    """
    square = float(mean.dot(mean))
    if not 0 < square < math.inf:
        return None
    factor = float(result.double().dot(mean)) / square
    rest = float((result - factor * mean).norm())
    return factor if rest < _SLACK * abs(factor) * math.sqrt(square) else 1.0


def _not_mean_error(factor: float, num_ranks: int) -> PacelineError:
    error = PacelineError(
        "PL391",
        saw=f"comm_hook returned {factor:.3g} times the mean of the gradients of {num_ranks} ranks.",
        rule="A hook averages, as torch's own do; the trainer multiplies its result by the number of ranks. "
        "The first gradients are compared with their mean.",
        fix="Divide the sum by the number of ranks: "
        "future.then(lambda done: done.value()[0] / dist.get_world_size()).",
    )
    error.on_every_rank = True
    return error


def _first_tensor(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
