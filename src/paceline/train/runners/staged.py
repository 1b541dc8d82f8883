"""Runs microbatches of a model that is cut into stages over `pp`.

A rank does the actions of its schedule in order (`pipeline/schedule.py`). Protocol, per action:

1. It waits for what the action needs from other stages. Receives are posted in the order in which the sender
   sends, one action ahead. Their shapes follow from the batch, so no message carries any.
2. It computes: a forward of one stage, or its backward, which begins at what the stage has made. A tensor
   that passes through gets its gradient in the same way, as in one process: before those of its own uses.
3. It sends what other stages need, and does not wait for it.

Gradients are set aside per stage and microbatch (`parallel/stages/reduction.py`). The gradient of a weight
that several stages use goes from its last use to its first, microbatch by microbatch, where one process adds
it. The sum then goes back to the other stages, which apply the same update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.generators import seed_generators
from paceline.mesh import Mesh
from paceline.parallel.exact import nothing_like
from paceline.parallel.flops import FlopCounter
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.order import LaidOut
from paceline.parallel.stages.plan import StageCut
from paceline.parallel.stages.record import LearnedTensor, Made
from paceline.parallel.stages.reduction import StageReduction, build_exchange
from paceline.parallel.stages.transfer import Form, StageTransfer
from paceline.pipeline.messages import Message, Payload, list_needs, list_results
from paceline.pipeline.schedule import Action, ActionKind, Schedule
from paceline.train.runners.runner import Runner
from paceline.train.runners.work import Work

Result = TypeVar("Result")


class _Door(torch.autograd.Function):
    """Passes a received tensor on to the model, and keeps its gradient.

    The gradient of a leaf could get other strides than in one process, where there is no leaf; kernels may
    add in another order then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: _Gradient) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept.value = gradients[0]
        return None, None


@dataclass
class _Gradient:
    """The gradient of a received tensor, once backward has computed it."""

    received: Tensor
    value: Tensor | None = None

    def read(self) -> Tensor:
        """Return it; where nothing flows back, numbers that change no sum."""
        return nothing_like(self.received) if self.value is None else self.value


@dataclass
class _Kept:
    """What is kept between a stage's forward and its backward.

    Attributes:
        received: gradients of what was received and needs one, in the order of the crossing.
        made: what the next stage received and needs a gradient, in the order of that crossing.
        loss: on the last stage.
    """

    received: list[_Gradient]
    made: list[Tensor]
    loss: Tensor | None


class StagedRunner(Runner):
    """The runner of a model that is cut into stages.

    Args:
        name, model, mesh, settings: as for `Runner`.
        laid_out: the result of laying out the model.
    """

    is_staged = True

    def __init__(self, name: str, model: nn.Module, laid_out: LaidOut, mesh: Mesh, **settings: Any) -> None:
        super().__init__(name, model, laid_out, mesh, **settings)
        assert laid_out.stages is not None
        self._stages = laid_out.stages
        self._pp = mesh.pp
        device = self._precision.device
        exchange = None if laid_out.lent is None else build_exchange(laid_out.lent, device)
        self._reductions = {
            stage: StageReduction([p for _, p in self._stages.list_summed(stage)], exchange, mesh.dp.rank)
            for stage in self._stages.own
        }
        self._weights = dict(model.named_parameters())
        self._shared = {
            n: users for n, users in self._stages.shared.items() if self._weights[n].requires_grad
        }
        self._cuts: list[StageCut] = []

    def silenced(self) -> AbstractContextManager[None]:
        raise PacelineError(
            "PL488",
            saw=f"steps without communication under layout.pp={self._pp.size}.",
            rule="A stage computes what another one has sent, so there is no step without communication.",
            fix="Measure whole steps, for example with `paceline bench scaling`.",
        )

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Do nothing: the state already is on its device."""

    # A step

    def _run_rounds(self, work: Work, *, count_flops: bool) -> float:
        """Run the schedule's actions, then sum the gradients over the data ranks."""
        share = work.share
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=self._precision.device))  # every rank needs its state
        for reduction in self._reductions.values():
            reduction.begin(share.num_owned)
        waited_s = 0.0
        if share.microbatches:
            waited_s = self._run_schedule(work, count_flops=count_flops)
        work.launch.now()
        started_s = time.perf_counter()
        for reduction in self._reductions.values():
            reduction.end()
        self._spread_shared()
        return waited_s + time.perf_counter() - started_s

    def _run_schedule(self, work: Work, *, count_flops: bool) -> float:
        """Do this rank's actions in order; return the seconds that it waited for other stages."""
        share = work.share
        batches = [self._precision.place_batch(batch) for _, batch in share.microbatches]
        self._cuts = [
            self._find_cut(work.objective, batch, self._drawing(work, samples))
            for batch, samples in zip(batches, share.samples, strict=True)
        ]
        schedule = self._stages.make_schedule(len(batches))
        transfer = self._begin_transfer(schedule, self._shared)
        actions = schedule.actions[self._pp.rank]
        kept: dict[tuple[int, int], _Kept] = {}
        num_flops, waited_s = 0.0, 0.0
        for number, action in enumerate(actions):
            for ahead in actions[number : number + 2]:
                for message in list_needs(ahead, schedule.num_stages, self._shared):
                    transfer.expect(message)
            started_s = time.perf_counter()
            needs = {m: transfer.take(m) for m in list_needs(action, schedule.num_stages, self._shared)}
            waited_s += time.perf_counter() - started_s
            with ExitStack() as stack:
                counter = None
                if count_flops and action.microbatch == 0:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                    counter = stack.enter_context(FlopCounter())
                place = action.stage, action.microbatch
                if action.kind is ActionKind.FORWARD:
                    given, kept[place] = self._run_forward(work, action, batches[action.microbatch], needs)
                else:
                    given = self._run_backward(work, action, kept.pop(place), needs)
            if counter is not None:
                num_flops += counter.get_total_flops()
            for message, tensors in given.items():
                transfer.give(message, tensors)
        started_s = time.perf_counter()
        transfer.finish()
        if count_flops:
            self._note_flops(num_flops, share)
        self._cuts = []
        return waited_s + time.perf_counter() - started_s

    def _run_forward(
        self, work: Work, action: Action, batch: Any, needs: dict[Message, list[Tensor]]
    ) -> tuple[dict[Message, list[Tensor]], _Kept]:
        """Run one stage's forward; return what it gives to others, and what its backward needs."""
        stage, number = action.stage, action.microbatch
        cut, index = self._cuts[number], work.share.microbatches[number][0]
        crossing = cut.crossings[stage]
        received, gradients = _receive(crossing, *needs.values())
        loss: Tensor | None = None
        self._start(work, index, batch)
        with self._drawing(work, work.share.samples[number]):
            with self._precision.autocast():
                made, output = self._stages.run(cut, stage, received, partial(work.objective.forward, batch))
            if stage + 1 == self._stages.num_stages:
                done: Loss = Objective(lambda _: output, work.objective.loss)
                loss = self._forward(_with_objective(work, done), index, batch)
        following = cut.crossings[stage + 1]
        outputs = [made[tensor.made] for tensor in following]
        roots = [tensor for tensor, each in zip(outputs, following, strict=True) if each.needs_grad]
        results = list_results(action, self._stages.num_stages, self._shared)
        return dict.fromkeys(results, outputs), _Kept(gradients, roots, loss)

    def _run_backward(
        self, work: Work, action: Action, kept: _Kept, needs: dict[Message, list[Tensor]]
    ) -> dict[Message, list[Tensor]]:
        """Run one stage's backward, and set its gradients aside; return what it gives to others."""
        stage, number = action.stage, action.microbatch
        roots, gradients = list(kept.made), []
        for message, tensors in needs.items():
            gradients += tensors
            if message.content is Payload.SHARED:
                # As a root it is added before the gradients of this stage's own uses, as in one process.
                roots.append(self._weights[message.name])
        with self._drawing(work, work.share.samples[number]):
            if kept.loss is not None:
                assert not roots
                self._backward(kept.loss, work.unit)
            elif roots:
                torch.autograd.backward(roots, gradients)
        given: dict[Message, list[Tensor]] = {}
        for message in list_results(action, self._stages.num_stages, self._shared):
            if message.content is Payload.SHARED:
                weight = self._weights[message.name]
                given[message] = [_gradient_of(weight)]
                weight.grad = None
            else:
                given[message] = [gradient.read() for gradient in kept.received]
        self._reductions[stage].set_aside(work.share.microbatches[number][0])
        return given

    def _spread_shared(self) -> None:
        """Send the sums for weights on several stages from the first of these stages to the others."""
        works = []
        for name, users in sorted(self._shared.items()):
            homes = list(dict.fromkeys(self._stages.homes[stage] for stage in users))
            if self._pp.rank not in homes:
                continue
            weight = self._weights[name]
            if self._pp.rank == homes[0]:
                sent = _gradient_of(weight).contiguous()
                works += [
                    (dist.isend(sent, group=self._pp.group, group_dst=peer), sent) for peer in homes[1:]
                ]
            else:
                found = torch.empty_like(weight, memory_format=torch.contiguous_format)
                dist.recv(found, group=self._pp.group, group_src=homes[0])
                weight.grad = found
        for work, _ in works:
            assert work is not None
            work.wait()

    def _note_flops(self, num_flops: float, share: Share) -> None:
        """Add up the operations of all stages in one microbatch."""
        total = torch.tensor(num_flops, dtype=torch.float64, device=self._precision.device)
        dist.all_reduce(total, group=self._pp.group)
        self.flops_per_sample = total.item() / math.ceil(share.num_samples / share.num_microbatches)

    # Forwards alone

    @torch.no_grad()
    def _forward_all(
        self,
        objective: Objective[Result],
        share: Share,
        seed_of: Callable[[int], int],
        around: Callable[[int, Any], AbstractContextManager[None]],
    ) -> list[Result]:
        """Run all microbatches through one stage after another; the results are on the last stage's rank."""
        batches = [self._precision.place_batch(batch) for _, batch in share.microbatches]
        indices = [index for index, _ in share.microbatches]
        self._cuts = [
            self._find_cut(objective, batch, around(index, batch))
            for index, batch in zip(indices, batches, strict=True)
        ]
        schedule = _list_forwards(self._stages.homes, self._pp.size, len(batches))
        transfer = self._begin_transfer(schedule, {})
        results: list[Result] = []
        for action in schedule.actions[self._pp.rank]:
            stage, number = action.stage, action.microbatch
            batch, cut = batches[number], self._cuts[number]
            needs = [transfer.take(m) for m in list_needs(action, schedule.num_stages, {})]
            received, _ = _receive(cut.crossings[stage], *needs)
            seed_generators(seed_of(indices[number]), self._precision.device)
            with around(indices[number], batch), self._precision.autocast():
                made, output = self._stages.run(cut, stage, received, partial(objective.forward, batch))
                if stage + 1 == schedule.num_stages:
                    results.append(objective.loss(output, batch))
            for message in list_results(action, schedule.num_stages, {}):
                transfer.give(message, [made[tensor.made] for tensor in cut.crossings[stage + 1]])
        transfer.finish()
        self._cuts = []
        return results

    # Both

    def _find_cut(
        self, objective: Objective[Any], batch: Any, drawing: AbstractContextManager[None]
    ) -> StageCut:
        with drawing, self._precision.autocast():
            return self._stages.find_cut(batch, partial(objective.forward, batch))

    def _begin_transfer(self, schedule: Schedule, shared: dict[str, tuple[int, ...]]) -> StageTransfer:
        return StageTransfer(self._pp, schedule, shared, self._describe, self._precision.device)

    def _describe(self, message: Message) -> list[Form]:
        """Return the forms of a message's tensors."""
        if message.content is Payload.SHARED:
            weight = self._weights[message.name]
            return [Form(tuple(weight.shape), weight.dtype)]
        cut = self._cuts[message.microbatch]
        if message.content is Payload.OUTPUT:
            return [Form(each.shape, each.dtype, each.stride) for each in cut.crossings[message.target]]
        needing = [tensor for tensor in cut.crossings[message.source] if tensor.needs_grad]
        return [Form(tensor.shape, tensor.dtype) for tensor in needing]

    def _compute(self, objective: Loss, batch: Any) -> tuple[Tensor, Tensor]:
        return objective(batch)

    def _propagate(self, scaled: Tensor) -> float:
        scaled.backward()  # type: ignore[no-untyped-call]
        return 0.0

    def _before_backward(self, work: Work, *, is_last: bool) -> None:
        """Do nothing: the agreement starts after the last action."""

    def _after_backward(self, work: Work, *, is_last: bool) -> None:
        """Do nothing: gradients are set aside by stage."""


def _receive(
    crossing: list[LearnedTensor], tensors: list[Tensor] | None = None
) -> tuple[dict[Made, Tensor], list[_Gradient]]:
    """Return what a stage gets, by name, and the gradients of those that need one."""
    received: dict[Made, Tensor] = {}
    gradients: list[_Gradient] = []
    for each, tensor in zip(crossing, tensors or [], strict=True):
        if each.needs_grad and torch.is_grad_enabled():
            gradients.append(_Gradient(tensor))
            tensor = _Door.apply(tensor.requires_grad_(), gradients[-1])  # type: ignore[no-untyped-call]
        received[each.made] = tensor
    return received, gradients


def _gradient_of(tensor: Tensor) -> Tensor:
    return nothing_like(tensor) if tensor.grad is None else tensor.grad


def _with_objective(work: Work, objective: Loss) -> Work:
    return Work(objective, work.share, work.step, work.phase, work.unit, work.launch)


def _list_forwards(homes: tuple[int, ...], num_ranks: int, num_microbatches: int) -> Schedule:
    """Return a schedule of forwards alone: all microbatches through one stage of a rank, then the next."""
    actions = [
        tuple(
            Action(ActionKind.FORWARD, stage, number)
            for stage, home in enumerate(homes)
            if home == rank
            for number in range(num_microbatches)
        )
        for rank in range(num_ranks)
    ]
    return Schedule("forwards", num_microbatches, homes, tuple(actions))
