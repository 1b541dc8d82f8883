"""Faults of pipelines: in what stages send each other, and in what each of them does by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel import norm
from paceline.parallel.stages.deferred import WeightGradients
from paceline.parallel.stages.reduction import StageSum
from paceline.parallel.stages.transfer import StageTransfer
from paceline.pipeline.messages import Message, Payload
from paceline.seeds import derive_seed
from paceline.train.runners.staged import StagedRunner
from paceline.train.update import Update

Tensors = Sequence[Tensor]


def _giving(change: Callable[[Message, Tensors], Tensors]) -> AbstractContextManager[Any]:
    """Change what stages send."""
    right = StageTransfer.give

    def give(self: StageTransfer, message: Message, tensors: Tensors) -> None:
        right(self, message, change(message, tensors))

    return mock.patch.object(StageTransfer, "give", give)


def _putting(change: Callable[[StageSum, int, Any], Any]) -> AbstractContextManager[Any]:
    """Change the gradients that a stage sets aside for a microbatch."""
    right = StageSum.put

    def put(self: StageSum, index: int, gradients: Any) -> None:
        right(self, index, change(self, index, gradients))

    return mock.patch.object(StageSum, "put", put)


@contextlib.contextmanager
def activations_swapped() -> Iterator[None]:
    """Two microbatches' activations are swapped between two stages."""
    right = StageTransfer.give
    held: list[tuple[Message, Tensors]] = []

    def give(self: StageTransfer, message: Message, tensors: Tensors) -> None:
        if message.content is not Payload.OUTPUT or message.microbatch > 1:
            right(self, message, tensors)
            return
        held.append((message, tensors))
        if len(held) == 2:
            (first, ones), (second, others) = held
            held.clear()
            right(self, first, others)
            right(self, second, ones)

    with mock.patch.object(StageTransfer, "give", give):
        yield


@contextlib.contextmanager
def stale_buffer() -> Iterator[None]:
    """A stage computes microbatch 1 with what it has received for microbatch 0."""
    right = StageTransfer.take
    kept: list[list[Tensor]] = []

    def take(self: StageTransfer, message: Message) -> list[Tensor]:
        found = right(self, message)
        if message.content is Payload.OUTPUT and message.microbatch == 0:
            kept[:] = [[tensor.detach().clone() for tensor in found]]
        if message.content is Payload.OUTPUT and message.microbatch == 1:
            return kept.pop()
        return found

    with mock.patch.object(StageTransfer, "take", take):
        yield


@contextlib.contextmanager
def activations_in_bf16() -> Iterator[None]:
    """A stage rounds the numbers that it sends to bf16."""

    def change(message: Message, tensors: Tensors) -> Tensors:
        return [t.bfloat16().to(t.dtype) if t.is_floating_point() else t for t in tensors]

    with _giving(change):
        yield


@contextlib.contextmanager
def skip_gradient_dropped() -> Iterator[None]:
    """The gradient of a skip that passes through a stage is dropped there."""

    def change(message: Message, tensors: Tensors) -> Tensors:
        if message.content is not Payload.GRADIENT or len(tensors) < 2:
            return tensors
        return [*tensors[:-1], torch.zeros_like(tensors[-1])]

    with _giving(change):
        yield


@contextlib.contextmanager
def shared_use_dropped() -> Iterator[None]:
    """The gradient of a shared weight's second use does not reach its first."""

    def change(message: Message, tensors: Tensors) -> Tensors:
        return [torch.zeros_like(t) for t in tensors] if message.content is Payload.SHARED else tensors

    with _giving(change):
        yield


@contextlib.contextmanager
def shared_use_twice() -> Iterator[None]:
    """The gradient of a shared weight's second use is counted twice."""

    def change(message: Message, tensors: Tensors) -> Tensors:
        return [2 * t for t in tensors] if message.content is Payload.SHARED else tensors

    with _giving(change):
        yield


@contextlib.contextmanager
def auxiliary_loss_on_every_stage() -> Iterator[None]:
    """An auxiliary loss that is a number per stage is counted once more on each stage that passes it on."""

    def change(message: Message, tensors: Tensors) -> Tensors:
        is_gradient = message.content is Payload.GRADIENT
        return [2 * t if is_gradient and not t.dim() else t for t in tensors]

    with _giving(change):
        yield


@contextlib.contextmanager
def late_gradients_lost() -> Iterator[None]:
    """The second half of microbatch 1's backward computes no gradients of weights."""
    right = StagedRunner._compute_weights

    def compute(self: StagedRunner, state: Any, action: Any) -> None:
        if action.microbatch == 1:
            state.due[action.stage, 1].weights = WeightGradients({}, set())
        right(self, state, action)

    with mock.patch.object(StagedRunner, "_compute_weights", compute):
        yield


@contextlib.contextmanager
def late_gradients_twice() -> Iterator[None]:
    """The second half of each backward adds its gradients of weights twice."""
    right = WeightGradients.keep

    def keep(self: WeightGradients, *kept: Any) -> None:
        right(self, *kept)
        right(self, *kept)

    with mock.patch.object(WeightGradients, "keep", keep):
        yield


@contextlib.contextmanager
def loss_divided_by_microbatches() -> Iterator[None]:
    """The last stage divides each loss by the number of microbatches."""
    right = StagedRunner.backward

    def backward(self: StagedRunner, work: Any, each: Any) -> None:
        right(self, work, each, each.loss_sum / 4)

    with mock.patch.object(StagedRunner, "backward", backward):
        yield


@contextlib.contextmanager
def last_microbatch_twice() -> Iterator[None]:
    """Each stage adds the gradient of the last microbatch twice."""

    def change(own: StageSum, index: int, gradients: Any) -> Any:
        return [None if g is None else 2 * g for g in gradients] if index == 3 else gradients

    with _putting(change):
        yield


@contextlib.contextmanager
def microbatch_lost_on_a_stage() -> Iterator[None]:
    """The second stage loses the gradients of microbatch 1."""

    def change(own: StageSum, index: int, gradients: Any) -> Any:
        return [None] * len(gradients) if index == 1 and dist.get_rank() == 1 else gradients

    with _putting(change):
        yield


@contextlib.contextmanager
def replicas_of_a_stage_not_summed() -> Iterator[None]:
    """The second stage's gradients are not summed over dp_replicate."""
    right = StageSum.end

    def end(self: StageSum) -> None:
        right(self)
        if dist.get_rank() >= 2:
            for parameter, own in zip(self._parameters, self._own, strict=True):  # type: ignore[attr-defined]
                parameter.grad = own

    with _putting(_keep_own), mock.patch.object(StageSum, "end", end):
        yield


def _keep_own(own: StageSum, index: int, gradients: Any) -> Any:
    """Keep the sum of this rank's gradients beside the right one."""
    before = getattr(own, "_own", None)
    first = index in (0, 2)
    own._own = [  # type: ignore[attr-defined]
        g if first or before is None or b is None else b if g is None else b + g
        for g, b in zip(gradients, before or gradients, strict=True)
    ]
    return gradients


@contextlib.contextmanager
def statistics_of_a_stage_lost() -> Iterator[None]:
    """The second stage does not report its BatchNorm statistics."""
    right = StagedRunner._report_stage_statistics

    def report(self: StagedRunner, work: Any, index: int) -> None:
        if dist.get_rank() == 0:
            right(self, work, index)

    with mock.patch.object(StagedRunner, "_report_stage_statistics", report):
        yield


@contextlib.contextmanager
def norm_of_own_stage() -> Iterator[None]:
    """Each rank clips by the norm of its own stage."""
    with (
        mock.patch.object(norm, "_fill_in_stages", lambda rows, mesh: rows),
        mock.patch.object(norm, "gather_rows", lambda own, group: own.reshape(1, -1)),
    ):
        yield


@contextlib.contextmanager
def dropout_by_stage() -> Iterator[None]:
    """Dropout's seeds depend on the stage; those of the first one are right."""

    def drawing(self: StagedRunner, work: Any, samples: Any) -> AbstractContextManager[None]:
        seed = derive_seed(self._seed + dist.get_rank(), work.step, work.phase)
        return self._masks.drawing(seed, samples)

    with mock.patch.object(StagedRunner, "_drawing", drawing):
        yield


@contextlib.contextmanager
def stage_not_updated() -> Iterator[None]:
    """The second stage keeps its weights."""
    right = Update._apply

    def apply(self: Update, gradients: Any, scale: float, norm: float) -> None:
        own = [p.detach().clone() for p in self.model.parameters() if not p.is_meta]
        right(self, gradients, scale, norm)
        if dist.get_rank() == 1:
            with torch.no_grad():
                for parameter, old in zip(
                    (p for p in self.model.parameters() if not p.is_meta), own, strict=True
                ):
                    parameter.copy_(old)

    with mock.patch.object(Update, "_apply", apply):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        activations_swapped,
        stale_buffer,
        activations_in_bf16,
        skip_gradient_dropped,
        shared_use_dropped,
        shared_use_twice,
        auxiliary_loss_on_every_stage,
        late_gradients_lost,
        late_gradients_twice,
        loss_divided_by_microbatches,
        last_microbatch_twice,
        microbatch_lost_on_a_stage,
        replicas_of_a_stage_not_summed,
        statistics_of_a_stage_lost,
        norm_of_own_stage,
        dropout_by_stage,
        stage_not_updated,
    )
}
