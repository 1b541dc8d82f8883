"""Exact reduction: sums gradients in an order that does not depend on which rank computed them.

The order is the tree of `comm/tree.py` over the microbatches of the global batch. Protocol of one step, on
every rank:

1. `begin` with the number of microbatches that each rank owns.
2. After the backward of every microbatch but the last, `set_aside`: it moves the gradients from the
   parameters and adds them to those with which they complete a subtree. (DDP's own accumulation goes from
   left to right.)
3. The last backward synchronises: per bucket of DDP, `reduce_bucket` adds the earlier gradients, then
   `comm/exchange.py` sums the subtrees of all ranks into the bucket. In a world of one there are no buckets:
   the last microbatch is set aside too.
4. `end`, which in a world of one stores the sum in the parameters.

Order of the collectives: one thread processes one bucket after another, in DDP's order, on a group of its
own. It issues all collectives of a bucket before the first of the next. Backward has to wait for the last
bucket anyway, so its own thread processes that one after all others: waking another thread takes 0.1 ms. If
callbacks chained the collectives instead, two ranks might issue the second half of one bucket and the first
half of the next in different orders, and receive each other's data without any error. On CUDA the order is
that of the calls on a stream of their own.

Memory: up to log2(microbatches of the rank) + 1 gradients besides the current one.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.exchange import Exchange, nothing_like
from paceline.comm.tree import ReductionPlan, Subtree, TreeSum, plan_reduction
from paceline.errors import PacelineError
from paceline.torch_seams.operators import add_to_each

# Per parameter, in a fixed order; `None` if no gradient reached it.
Gradients = list[Tensor | None]
# The default size of DDP's buckets.
DDP_BUCKET_BYTES = 25 << 20


class ExactReduction:
    """The gradients of one model, summed in the order of the tree.

    Collective: every rank of the group must construct it and run the same buckets.

    Args:
        model: its parameters to train.
        group: the ranks, used for nothing else; `None` in a world of one.
        device: of the model.
        apart: parameters whose gradients are summed elsewhere.
        bucket_bytes: of DDP's buckets, in which gradients are summed.

    Attributes:
        exchange: sums over ranks; `None` in a world of one.

    Raises:
        PacelineError: PL425 for sparse gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        apart: Sequence[Tensor] = (),
        *,
        bucket_bytes: int = DDP_BUCKET_BYTES,
    ) -> None:
        others = {id(parameter) for parameter in apart}
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in others]
        self._parameters = [p for _, p in named]
        self._places = {id(p): place for place, (_, p) in enumerate(named)}
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._plan: ReductionPlan | None = None
        self._last_leaf: int | None = None
        self._sum: TreeSum[Gradients] = TreeSum(0, add_gradients)
        self.exchange: Exchange | None = None
        self._line: _OrderedThread | None = None
        if group is not None:
            on_cpu = device.type == "cpu"
            self.exchange = Exchange(group, device)
            self._line = _OrderedThread() if on_cpu else None
            self._stream = None if on_cpu else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per rank of the group, the number of microbatches that it computes, numbered
                consecutively.
        """
        self._plan = plan_reduction(num_owned)
        self._sum = TreeSum(self._plan.num_leaves, add_gradients)
        before, own = sum(num_owned[: self._rank]), num_owned[self._rank]
        self._last_leaf = before + own - 1 if own else None

    @torch.no_grad()
    def set_aside(self, index: int) -> None:
        """Move the gradients of microbatch `index` from the parameters to the sum."""
        self._sum.push((index, index + 1), self._take_gradients())

    def _take_gradients(self) -> Gradients:
        """Move the gradients from the parameters."""
        settle_conjugates(self._parameters)
        gradients: Gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if any(g is not None and g.layout != torch.strided for g in gradients):
            raise sparse_error("a gradient is a sparse tensor.")
        return gradients

    def is_used(self, parameter: Tensor) -> bool:
        """Return whether a microbatch that was set aside in this step has given a parameter a gradient."""
        place = self._places[id(parameter)]
        return any(gradients[place] is not None for _, gradients in self._sum.subtrees)

    def fill_missing(self) -> None:
        """Add a zero gradient to all parameters, before a last microbatch that may leave some out.

        DDP requires one for every parameter that an earlier microbatch has used.
        """
        for parameter in self._parameters:
            parameter.grad = nothing_like(parameter)

    @torch.no_grad()
    def end(self, *, reduced: bool) -> None:
        """End a global batch.

        Args:
            reduced: whether the last microbatch was reduced over ranks; if not, the sum of all gradients that
                were set aside is stored in the parameters.

        Raises:
            Exception: any error raised while a bucket was summed over ranks.
        """
        if self._line is not None and self._line.failures:
            raise self._line.failures[0]
        subtrees = self._sum.subtrees
        self._sum, self._plan = TreeSum(0, add_gradients), None
        if reduced or not subtrees:
            return
        # Several subtrees remain only if the other ranks' are left out on purpose (`Replica.silenced`).
        *others, (_, total) = subtrees
        for _, gradients in reversed(others):
            total = add_gradients(gradients, total)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket with the earlier gradients, and over ranks; called by DDP's hook."""
        total = bucket.buffer()
        if self._plan is None or not self._plan.num_leaves:
            # DDP's first pass over the graph, or a global batch without samples: zeros everywhere.
            return complete_future(total)
        plan, leaf = self._plan, self._last_leaf
        views: list[Tensor] = []
        aside: list[tuple[Subtree, Gradients]] = []
        if self._sum.subtrees:
            parameters = bucket.parameters()
            views = view_gradients(total, parameters)
            places = [self._places[id(parameter)] for parameter in parameters]
            aside = [(subtree, [values[place] for place in places]) for subtree, values in self._sum.subtrees]

        def work() -> None:
            assert self.exchange is not None
            with torch.no_grad():
                subtrees = _complete_subtrees(plan, aside, leaf, views, total)
                self.exchange.sum_subtrees(subtrees, plan, total)

        if self._line is not None:
            return self._line.do(work, total) if bucket.is_last() else self._line.submit(work, total)
        return self._run_on_stream(work, total, [g for _, values in aside for g in values if g is not None])

    def close(self) -> None:
        """End the issuing thread."""
        if self._line is not None:
            self._line.close()

    def _run_on_stream(
        self, work: Callable[[], None], total: Tensor, aside: list[Tensor]
    ) -> torch.futures.Future[Tensor]:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        for gradient in aside:  # freed by the host while the stream may still read it
            gradient.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            work()
            return complete_future(total)


class _OrderedThread:
    """A thread that runs one task after another, in the order of submission.

    Attributes:
        failures: the exception raised, at most one. After it no task runs any more, because its collectives
            would meet peers that are a bucket ahead or behind. The futures are completed all the same: DDP
            would not accept one with an exception as a tensor, and the message would be lost.
    """

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self._latest: torch.futures.Future[Tensor] | None = None
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The thread has no reference to this object, so a reduction that is dropped is collected and ends it.
        arguments = (self._queue, self.failures)
        threading.Thread(target=_serve, args=arguments, name="paceline-exact", daemon=True).start()
        self._end = weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
        """Return a future that completes with `result` once `work` is done."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._latest = future
        self._queue.put((work, result, future))
        return future

    def do(self, work: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
        """Do the same in the calling thread, after all submitted tasks."""
        if self._latest is not None:
            self._latest.wait()
            self._latest = None
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        _run((work, result, future), self.failures)
        return future

    def close(self) -> None:
        self._end()


_Task = tuple[Callable[[], None], Tensor, "torch.futures.Future[Tensor]"]


def _serve(tasks: queue.SimpleQueue[_Task | None], failures: list[Exception]) -> None:
    while (task := tasks.get()) is not None:
        _run(task, failures)
        del task  # no reference is kept while the thread waits


def _run(task: _Task, failures: list[Exception]) -> None:
    work, result, future = task
    if not failures:
        try:
            work()
        except Exception as error:
            failures.append(error)
    future.set_result(result)


def complete_future(total: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future of a tensor that is complete, on CUDA once the current stream has finished."""
    future: torch.futures.Future[Tensor]
    future = torch.futures.Future(devices=[total.device] if total.is_cuda else [])
    future.set_result(total)
    return future


def _complete_subtrees(
    plan: ReductionPlan,
    aside: list[tuple[Subtree, Gradients]],
    leaf: int | None,
    views: Sequence[Tensor],
    total: Tensor,
) -> list[list[Tensor]]:
    """Return this rank's subtrees of one bucket, flat: earlier gradients, and the last one's `views`."""
    if leaf is None:
        return []
    if not aside:
        return [[total]]
    tree = TreeSum(plan.num_leaves, add_gradients, aside)
    tree.push((leaf, leaf + 1), list(views))
    *others, _ = tree.subtrees
    flat = [[_flatten_like(g, view) for g, view in zip(values, views, strict=True)] for _, values in others]
    return [*flat, [total]]


def view_gradients(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that a bucket holds, with the strides that DDP gave them: their parameters'.

    `GradBucket.gradients()` ignores strides, so a channels-last weight would be read in another order. DDP's
    buckets have the two real numbers of each complex one.
    """
    views, start = [], 0
    for parameter in parameters:
        is_paired = parameter.is_complex() and not buffer.is_complex()
        part = buffer[start : start + parameter.numel() * (2 if is_paired else 1)]
        start += part.numel()
        part = torch.view_as_complex(part.view(-1, 2)) if is_paired else part
        if parameter.is_contiguous() or torch.empty_like(parameter).stride() != parameter.stride():
            views.append(part.view(parameter.shape))
        else:
            views.append(part.as_strided(parameter.size(), parameter.stride()))
    assert start == buffer.numel()
    return views


def settle_conjugates(parameters: Iterable[Tensor]) -> None:
    """Write out gradients that autograd leaves as views to be conjugated, which foreach kernels refuse."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum, in place of `right`. A missing gradient adds nothing, not even the sign of a zero."""
    lefts, rights = [g for g in left if g is not None], [g for g in right if g is not None]
    if len(lefts) < len(left) or len(rights) < len(right):
        pairs = zip(left, right, strict=True)
        return [b if a is None else a if b is None else b.add_(a) for a, b in pairs]
    add_to_each(rights, lefts)
    return right


def _flatten_like(gradient: Tensor | None, view: Tensor) -> Tensor:
    """Return the elements in the order of `view` in memory: buckets follow their parameters' strides."""
    if gradient is None:
        return nothing_like(view).reshape(-1)
    if view.is_contiguous():
        return gradient.reshape(-1)
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    return gradient.permute(order).reshape(-1)


def check_dense(model: nn.Module) -> None:
    """Raise PL425 for layers whose gradients are sparse."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise sparse_error(f"{name} ({type(module).__name__}) is built with sparse=True.")


@contextmanager
def explaining_sparse() -> Iterator[None]:
    """Raise PL425 in place of torch's errors for a gradient of a function called with sparse=True."""
    try:
        yield
    except RuntimeError as error:
        if "Sparse" in str(error):
            raise sparse_error("a gradient is a sparse tensor.") from error
        raise


def sparse_error(saw: str) -> PacelineError:
    """Return the error for a sparse gradient."""
    return PacelineError(
        "PL425",
        saw=saw,
        rule="Gradients are added over microbatches and ranks element by element.",
        fix="Build the layer with sparse=False; SGD and Adagrad then give the same weights.",
    )
