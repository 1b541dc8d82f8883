"""Exact reduction: gradients are summed in an order that doesn't depend on who computed them.

The order is the tree of `comm/tree.py` over the microbatches of the global batch. Protocol of one step,
on every rank:

1. `begin` with how many microbatches each rank owns.
2. After the backward of every microbatch but the last, `set_aside`: its gradients leave the parameters
   and are added to what they complete a subtree with. (DDP's own accumulation goes from left to right.)
3. The last backward synchronises: per bucket of DDP, `reduce_bucket` adds what was set aside, then
   `comm/exchange.py` sums the subtrees of all ranks into the bucket. In a world of one there are no buckets:
   the last microbatch is set aside too.
4. `end`, which in a world of one puts the sum into the parameters.

Who may issue what, and when: one thread takes bucket after bucket, in DDP's order, and issues all
collectives of one before the first of the next, on a group of its own. Backward has to wait for the last
bucket anyway, so its own thread does that one after all others: waking another thread takes 0.1 ms.
Chained by callbacks instead, two ranks may come to the second half of one bucket and the first half of the
next in different orders, and get each other's data without any error. On CUDA the order is that of the calls
on a stream of its own.

Memory: up to log2(microbatches of the rank) + 1 gradients beside the current one.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import ReductionPlan, Subtree, TreeSum, plan_reduction
from paceline.errors import PacelineError
from paceline.torch_seams.operators import add_to_each

# Per parameter, in one order; `None` where no gradient reached it.
Gradients = list[Tensor | None]


class ExactReduction:
    """The gradients of one model, summed in the order of the tree.

    Collective: every rank of the group must construct it and run the same buckets.

    Args:
        model: its parameters to train.
        group: the ranks, which nobody else may use; `None` in a world of one.
        device: of the model.

    Attributes:
        exchange: what sums over ranks; `None` in a world of one.

    Raises:
        PacelineError: PL425 for sparse gradients.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._places = {id(p): place for place, (_, p) in enumerate(named)}
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) is True:
                raise _sparse_error(f"{name} ({type(module).__name__}) is built with sparse=True.")
        self._rank = 0 if group is None else group.rank()
        self._plan: ReductionPlan | None = None
        self._last_leaf: int | None = None
        self._sum: TreeSum[Gradients] = TreeSum(0, _add_gradients)
        self.exchange: Exchange | None = None
        self._line: _OrderedThread | None = None
        if group is not None:
            on_cpu = device.type == "cpu"
            self.exchange = SharedMemoryExchange(group) if on_cpu else MessageExchange(group, device)
            self._line = _OrderedThread() if on_cpu else None
            self._stream = None if on_cpu else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Starts a global batch.

        Args:
            num_owned: per rank of the group, how many microbatches it computes; numbered through.
        """
        self._plan = plan_reduction(num_owned)
        self._sum = TreeSum(self._plan.num_leaves, _add_gradients)
        before, own = sum(num_owned[: self._rank]), num_owned[self._rank]
        self._last_leaf = before + own - 1 if own else None

    @torch.no_grad()
    def set_aside(self, index: int) -> None:
        """Takes the gradients of microbatch `index` off the parameters."""
        gradients: Gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if any(g is not None and g.layout != torch.strided for g in gradients):
            raise _sparse_error("a gradient is a sparse tensor.")
        self._sum.push((index, index + 1), gradients)

    def is_used(self, parameter: Tensor) -> bool:
        """Whether a microbatch that was set aside in this step has given a parameter a gradient."""
        place = self._places[id(parameter)]
        return any(gradients[place] is not None for _, gradients in self._sum.subtrees)

    def fill_missing(self) -> None:
        """Before a last microbatch that may leave parameters out: gives all a gradient that adds nothing.

        DDP wants one for every parameter that an earlier microbatch has used.
        """
        for parameter in self._parameters:
            parameter.grad = _nothing_like(parameter)

    @torch.no_grad()
    def end(self, *, reduced: bool) -> None:
        """Ends a global batch.

        Args:
            reduced: whether the last microbatch was reduced over ranks; if not, the sum of all that was set
                aside goes into the parameters.

        Raises:
            Exception: what went wrong while a bucket was summed over ranks.
        """
        if self._line is not None and self._line.failures:
            raise self._line.failures[0]
        subtrees = self._sum.subtrees
        self._sum, self._plan = TreeSum(0, _add_gradients), None
        if reduced or not subtrees:
            return
        # More than one subtree only where the other ranks' are left out on purpose (`Replica.silenced`).
        *others, (_, total) = subtrees
        for _, gradients in reversed(others):
            total = _add_gradients(gradients, total)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sums a bucket with what was set aside, and over ranks; DDP's hook calls it."""
        total = bucket.buffer()
        if self._plan is None or not self._plan.num_leaves:
            # DDP's first look at the graph, or a global batch without samples: zeros everywhere.
            return _complete(total)
        plan, leaf = self._plan, self._last_leaf
        views: list[Tensor] = []
        aside: list[tuple[Subtree, Gradients]] = []
        if self._sum.subtrees:
            parameters = bucket.parameters()
            views = _view_gradients(total, parameters)
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
        """Ends the issuing thread."""
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
            return _complete(total)


class _OrderedThread:
    """A thread that does one thing after the other, in the order in which they were handed in.

    Attributes:
        failures: what was raised, at most one thing: after it nothing is done any more, because what comes
            next would meet peers that are a bucket ahead or behind. The futures are completed all the same;
            one with an exception would reach DDP as something that is no tensor, its message lost.
    """

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self._latest: torch.futures.Future[Tensor] | None = None
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The thread doesn't know this object, so a forgotten reduction is collected and ends it.
        arguments = (self._queue, self.failures)
        threading.Thread(target=_serve, args=arguments, name="paceline-exact", daemon=True).start()
        self._end = weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
        """A future that gives `result` once `work` is done."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._latest = future
        self._queue.put((work, result, future))
        return future

    def do(self, work: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
        """The same, done in the calling thread after all that was submitted."""
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
        del task  # nothing is kept alive while this waits


def _run(task: _Task, failures: list[Exception]) -> None:
    work, result, future = task
    if not failures:
        try:
            work()
        except Exception as error:
            failures.append(error)
    future.set_result(result)


def _complete(total: Tensor) -> torch.futures.Future[Tensor]:
    """A future of what is there already, or on CUDA, of what the current stream will have made by then."""
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
    """This rank's subtrees of one bucket, flat: what was set aside, and the last microbatch in `views`."""
    if leaf is None:
        return []
    if not aside:
        return [[total]]
    tree = TreeSum(plan.num_leaves, _add_gradients, aside)
    tree.push((leaf, leaf + 1), list(views))
    *others, _ = tree.subtrees
    flat = [[_flatten_like(g, view) for g, view in zip(values, views, strict=True)] for _, values in others]
    return [*flat, [total]]


def _view_gradients(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that lie in a bucket, with the strides that DDP gave them: those of their parameters.

    `GradBucket.gradients()` ignores strides, so a channels-last weight would be read in another order.
    """
    views, start = [], 0
    for parameter in parameters:
        part = buffer[start : start + parameter.numel()]
        start += parameter.numel()
        if parameter.is_contiguous() or torch.empty_like(parameter).stride() != parameter.stride():
            views.append(part.view(parameter.shape))
        else:
            views.append(part.as_strided(parameter.size(), parameter.stride()))
    assert start == buffer.numel()
    return views


def _add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in place of `right`. A missing gradient adds nothing, not even the sign of a zero."""
    lefts, rights = [g for g in left if g is not None], [g for g in right if g is not None]
    if len(lefts) < len(left) or len(rights) < len(right):
        pairs = zip(left, right, strict=True)
        return [b if a is None else a if b is None else b.add_(a) for a, b in pairs]
    add_to_each(rights, lefts)
    return right


def _flatten_like(gradient: Tensor | None, view: Tensor) -> Tensor:
    """The elements in the order in which `view` has them in memory: buckets follow parameters' strides."""
    if gradient is None:
        return _nothing_like(view).reshape(-1)
    if view.is_contiguous():
        return gradient.reshape(-1)
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    return gradient.permute(order).reshape(-1)


def _nothing_like(tensor: Tensor) -> Tensor:
    """Zeros that change no bit of what they are added to: x + -0.0 is x, also for -0.0."""
    return torch.full_like(tensor, -0.0)


def _sparse_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL425",
        saw=saw,
        rule="The exact reduction adds dense gradients, element by element.",
        fix='Build the layer with sparse=False, or use reduction="fast".',
    )
