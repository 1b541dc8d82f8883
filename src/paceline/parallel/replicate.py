"""Replication: every rank holds the model, gradients are summed over `dp_replicate`.

Protocol of one optimizer step, on every rank of the group:

1. All microbatches but the last run under `no_sync`: their gradients add up locally.
2. The last one runs with synchronisation: DDP has one bucket after another summed over the ranks while
   backward is still computing earlier layers. That is the only round of gradient traffic per step. The
   fast reduction is the library's all-reduce; for the exact one see `exact.py`.
   A microbatch may leave parameters out. After its backward they get a gradient of -0.0, which changes no
   bit of a sum and makes their buckets complete.
3. A rank that owns no microbatch runs `forward_nothing()`: a loss of zero that reaches every
   parameter, so that it joins the same all-reduces with zeros.

Which gradients share a bucket follows from the model alone, never from a step's course: see `_show_graph`.

Gradients are *summed*, not averaged: dividing by the global weight is the caller's, who knows it.

Built on `torch.nn.parallel.DistributedDataParallel` (Li et al. 2020, https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.exact import ExactReduction
from paceline.parallel.hook_state import HookState
from paceline.parallel.objective import Compute
from paceline.phrases import name_some
from paceline.recipe.schema import DdpSection
from paceline.torch_seams.tensors import read_version

CommHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

# torch 2.13 renamed it and deprecates the old name.
_BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class _Reach(torch.autograd.Function):
    """Passes a number on; in backward, gives a parameter a gradient of one value."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.value = value
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.saved_tensors[0], ctx.value), None


def _zero_loss(parameters: Sequence[Tensor], value: float = 0.0) -> Tensor:
    """Zero, with a gradient of `value` for every parameter; the last one gets it first, as in most models."""
    zero = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        zero = _Reach.apply(zero, parameter, value)  # type: ignore[no-untyped-call]
    return zero


def _read_version(parameter: Tensor) -> int:
    """A number that changes when backward adds to a parameter's gradient."""
    return -1 if parameter.grad is None else read_version(parameter.grad)


class LossModule(nn.Module):
    """A model together with what is computed from it, so that DDP sees one forward per microbatch.

    The user's functions get the bare model: no `module.` in parameter names, no wrapper to look
    through, and a loss that calls the model several times is still one forward for DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Compute | None, batch: Any) -> tuple[Tensor, Tensor]:
        """Gives `compute(batch)`, or without `compute` a zero that reaches every parameter."""
        if compute is None:
            zero = _zero_loss([p for p in self.model.parameters() if p.requires_grad])
            return zero, zero.detach()
        return compute(batch)


class Replica:
    """A model whose gradients are summed over the ranks of a mesh axis.

    Collective: every rank of the axis must construct it, and run the same number of synchronising
    backwards. Construction broadcasts parameters and buffers from the axis' first rank, and reduces
    gradients of zeros once.

    Args:
        model: the model, on its device, in its final dtype, with parameters to train.
        axis: the ranks that hold copies.
        settings: DDP's settings.
        exact: what sums the buckets in place of the library's all-reduce.
        comm_hook: a `(state, hook)` as for `DistributedDataParallel.register_comm_hook`. It must
            average over the ranks, which is what torch's own hooks do.

    Attributes:
        group: the ranks that hold copies.
        num_ranks: how many they are.
        hook_state: what the communication hook keeps between steps, if it keeps anything.
        silent: whether backwards reduce nothing at the moment, see `silenced`.
        is_used: whether the last forward was that of a microbatch.
        left_out: the parameters that the last reducing backward has left out and no earlier one of the step
            has given a gradient.

    Communication: one all-reduce of the gradients per synchronising backward, 2(n-1)/n times their
    bytes per rank on a ring of n; for the exact reduction see `comm/exchange.py`.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        settings: DdpSection,
        exact: ExactReduction | None = None,
        comm_hook: tuple[Any, CommHook] | None = None,
    ) -> None:
        assert exact is None or comm_hook is None
        self._loss_module = LossModule(model)
        self.group = axis.group
        self._exact = exact
        self._averaging_hook: tuple[Any, CommHook] | None = None
        state = HookState(None if comm_hook is None else comm_hook[0])
        self.hook_state = None if state.is_empty else state
        self.num_ranks = axis.size
        self.silent = False
        self.last_bucket_launched = False
        self.is_used = False
        self.left_out: list[Tensor] = []
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # With a static graph DDP counts on every step using what the first did; with a search for unused
        # parameters it completes buckets itself.
        self._completes = not settings.static_graph and not settings.find_unused_parameters
        self._is_reducing = False
        self._before_last_bucket: Callable[[], None] | None = None
        self._last_launch_s = 0.0
        for buffer in model.buffers():
            # DDP does this for parameters; for buffers only where it also copies them in every forward.
            dist.broadcast(buffer, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._ddp = DistributedDataParallel(
            self._loss_module,
            process_group=self.group,
            **{_BUFFERS_ARGUMENT: settings.broadcast_buffers},  # type: ignore[arg-type]
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        # A lambda, because DDP compares annotations with types and ours are strings.
        self._ddp.register_comm_hook(None, lambda _state, bucket: self._reduce_bucket(bucket))
        if not settings.find_unused_parameters:  # with it, DDP neither orders buckets nor keeps a graph
            for _ in range(2 if settings.static_graph else 1):
                self._show_graph()
        self._averaging_hook = comm_hook

    @property
    def gradient_scale(self) -> float:
        """What a reduced gradient must be multiplied with to be the sum over the ranks."""
        return 1.0 if self._averaging_hook is None else float(self.num_ranks)

    @property
    def waits_for_all(self) -> bool:
        """Whether no rank ends a reducing backward before all have begun it.

        A hook of the user's may do anything.
        """
        return self._averaging_hook is None

    def forward(self, compute: Compute, batch: Any) -> tuple[Tensor, Tensor]:
        """Runs `compute(batch)` under DDP."""
        self.is_used = True
        result: tuple[Tensor, Tensor] = self._ddp(compute, batch)
        return result

    def forward_nothing(self) -> Tensor:
        """In place of a microbatch: a zero that reaches every parameter."""
        self.is_used = False
        zero: Tensor = self._ddp(None, None)[0]
        return zero

    @contextmanager
    def synchronising(
        self, sync: bool, before_last_bucket: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Around forward and backward of a microbatch: whether its backward reduces the gradients.

        Args:
            sync: whether it does.
            before_last_bucket: called in such a backward when all gradients of this rank are there, before
                the last of them are sent.
        """
        if not sync or self.silent:
            with self._ddp.no_sync():
                yield
            return
        self.last_bucket_launched = False
        self._is_reducing, self._before_last_bucket = True, before_last_bucket
        try:
            yield
        finally:
            self._is_reducing, self._before_last_bucket = False, None

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, no backward reduces: for timing compute alone. Each rank keeps its own gradients."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def backward(self, loss: Tensor) -> float:
        """Runs backward; gives the seconds it waited for communication after the last gradient.

        Under CUDA the host doesn't wait in backward, so the figure is 0 there.
        """
        self._last_launch_s = 0.0
        self.left_out = []
        completes = self._is_reducing and self._completes
        before = [_read_version(p) for p in self._trained] if completes else []
        loss.backward()  # type: ignore[no-untyped-call]
        if completes and not self.last_bucket_launched:
            self._complete(before)
        if not self._last_launch_s or loss.is_cuda:
            return 0.0
        return time.perf_counter() - self._last_launch_s

    def _complete(self, before: list[int]) -> None:
        """Gives what backward has left out a gradient, which DDP waits for."""
        missing = [p for p, old in zip(self._trained, before, strict=True) if _read_version(p) == old]
        self.left_out = [p for p in missing if p.grad is None]
        if missing:
            _zero_loss(missing, -0.0).backward()  # type: ignore[no-untyped-call]

    def check_reduced(self) -> None:
        """After a synchronising backward: raises unless every bucket was reduced.

        Raises:
            PacelineError: PL421, naming the parameters that got no gradient. DDP itself notices at
                the next forward only, when the step has been taken with unreduced gradients.
        """
        if self.last_bucket_launched:
            return
        named = self._loss_module.model.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        shown = name_some(unused, 8)
        raise PacelineError(
            "PL421",
            saw=f"{len(unused)} parameters got no gradient on rank {dist.get_rank()}: {shown}.",
            rule="Ranks sum gradients bucket by bucket, and a bucket waits for all of its parameters.",
            fix="Leave ddp.static_graph out, or set requires_grad=False on parameters that the loss does not "
            "use.",
        )

    def _show_graph(self) -> None:
        """Runs one backward of zeros, in which every parameter is used once, the last one first.

        DDP puts parameters into buckets anew after the first backward (with a static graph, the second).
        So the first step of a start would be reduced in other buckets than the same step of a run that
        was never stopped; on three and more ranks sums in a ring would then have other last bits.

        With a static graph DDP also takes the first backward for the graph of all steps, and counts
        gradients under `no_sync` too: a first step of several microbatches would fail inside torch.
        """
        self.backward(self.forward_nothing())
        for parameter in self._loss_module.parameters():
            parameter.grad = None

    def _reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._last_launch_s = time.perf_counter()
        if bucket.is_last():
            self.last_bucket_launched = True
            if self._before_last_bucket is not None:
                self._before_last_bucket()
        if self._exact is not None:
            return self._exact.reduce_bucket(bucket)
        if self._averaging_hook is not None:
            state, hook = self._averaging_hook
            future = hook(state, bucket)
            if not bucket.buffer().is_cuda:
                # gloo runs callbacks in threads of its own, in an order that differs between ranks: hooks
                # that chain collectives (PowerSGD) on several buckets at once would hang or mix them up.
                future.wait()
            return future
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(_first_tensor)
        return reduced


def _first_tensor(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
