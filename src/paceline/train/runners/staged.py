"""Runs the steps of a model that is cut into stages over `pp`.

A rank does the actions of its schedule in order (`pipeline/schedule.py`). Protocol, per action:

1. It waits for what the action needs from other stages. Sends and receives are posted in one order for all
   ranks, receives one action ahead. Their shapes follow from the batch, so no message carries any.
2. It computes: a forward of one stage, or its backward, which begins at what the stage has made. A tensor
   that passes through gets its gradient in the same way, as in one process: before those of its own uses.
3. It sends what other stages need, and does not wait for it.

A divided backward is two actions. The first one is a whole backward, in which linear layers and convolutions
keep back the gradients of their weights; the second one computes these (`parallel/stages/deferred.py`).

Gradients are set aside per stage and microbatch (`parallel/stages/reduction.py`). The gradient of a weight
that several stages use goes from its last use to its first, microbatch by microbatch, where one process adds
it. The sum then goes back to the other stages, which apply the same update.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.tree_exchange import nothing_like
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.flops import FlopCounter
from paceline.parallel.objective import Loss
from paceline.parallel.order import LaidOut
from paceline.parallel.placement import local
from paceline.parallel.recompute import explaining_recompute
from paceline.parallel.shard.scalars import split_groups
from paceline.parallel.stages.cut import changed_error
from paceline.parallel.stages.deferred import WeightGradients, deferring, list_deferrable
from paceline.parallel.stages.received import ReceivedGradient, receive
from paceline.parallel.stages.reduction import build_sums
from paceline.parallel.sums.gradients import Gradients
from paceline.phrases import first_line
from paceline.pipeline.messages import Message, Payload, list_needs, list_results
from paceline.pipeline.schedule import Action, ActionKind
from paceline.pipeline.under_way import UNDER_WAY
from paceline.train.runners.staged_forwards import StagedForwards
from paceline.train.runners.work import Round, Work


@dataclass
class _Kept:
    """The values kept between a stage's forward and its backward.

    Attributes:
        received: gradients of what was received and needs one, in the order of the crossing.
        made: what the next stage received and needs a gradient, in the order of that crossing.
        loss: on the last stage.
        weights: keeps back the gradients of weights; `None` if the backward is not divided.
    """

    received: list[ReceivedGradient]
    made: list[Tensor]
    loss: Tensor | None
    weights: WeightGradients | None


@dataclass
class _Progress:
    """The state of one step's actions on this rank.

    Attributes:
        batches: by microbatch, on the device.
        divided: stages and microbatches whose backward is divided.
        kept: by stage and microbatch, between forward and backward.
        due: by stage and microbatch, between the two halves of a backward.
        weights: keeps back the gradients of weights in the action that runs.
    """

    work: Work
    batches: list[Any]
    divided: set[tuple[int, int]]
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    due: dict[tuple[int, int], _Due] = field(default_factory=dict)
    weights: WeightGradients | None = None


@dataclass
class _Due:
    """The gradients from the first half of a backward, and the work left for the second half."""

    gradients: Gradients
    weights: WeightGradients


class StagedRunner(StagedForwards):
    """The runner of a model that is cut into stages.

    Args:
        name, model, mesh, settings: as for `Runner`.
        laid_out: the result of laying out the model.
    """

    def __init__(self, name: str, model: nn.Module, laid_out: LaidOut, mesh: Mesh, **settings: Any) -> None:
        super().__init__(name, model, laid_out, mesh, **settings)
        apart = set() if self._experts is None else {id(p) for p in self._experts.parameters}
        # The last stage first, in which order sums over the data ranks are started.
        self._reductions = build_sums(
            {
                stage: [p for _, p in self._stages.list_summed(stage) if id(p) not in apart]
                for stage in reversed(self._stages.own)
            },
            mesh,
            laid_out.lent,
            self._precision.device,
            self._shards,
            is_exact=laid_out.settings.exact,
        )
        self._num_started = 0
        self._shared = {
            n: users for n, users in self._stages.shared.items() if self._weights[n].requires_grad
        }
        self._deferrable = list_deferrable(model)
        self._excluded = {id(self._weights[name]) for name in self._shared}

    def silenced(self) -> AbstractContextManager[None]:
        raise PacelineError(
            "PL488",
            saw=f"steps without communication under layout.pp={self._pp.size}.",
            rule="A stage computes on tensors that another one has sent, so there is no step without "
            "communication.",
            fix="Measure whole steps, for example with `paceline bench scaling`.",
        )

    def step(self, optimizer: Optimizer) -> None:
        if self._shards is None or self._experts is None:
            optimizer.step()
            return
        with split_groups(optimizer):
            optimizer.step()

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        super().close()

    # A step

    def run(self, work: Work) -> float:
        """Run the schedule's actions, then sum the gradients over the data ranks."""
        assert work.objective is not None
        work, share = replace(work, objective=self._reads.watch(work.objective)), work.share
        self._num_started = 0
        self._statistics.begin(share.num_owned)
        for reduction in self._reductions.values():
            reduction.begin(share.num_owned)
        if self._experts is not None:
            self._experts.begin(share.num_owned, idle_first=False, num_rounds=self._count_rounds(share))
        waited_s = 0.0
        if self._count_rounds(share):
            with self._whole():
                waited_s = self._run_schedule(work)
        started_s = time.perf_counter()
        work.launch.now()
        self._start_sums()
        for reduction in self._reductions.values():
            reduction.end()
        if self._experts is not None:
            self._experts.end()
        self._spread_shared()
        self._warn_unsafe_draws()
        return waited_s + time.perf_counter() - started_s

    def _join(self, action: Action, following: Action | None) -> None:
        """Take part in the collectives of an action of other data ranks."""
        next_stage = None if following is None else following.stage
        if self._shards is not None:
            self._shards.gather(action.stage, next_stage)
        if self._experts is not None:
            self._join_experts(self._experts, action)
        if self._shards is None:
            return
        self._shards.free(action.stage, next_stage)
        reduction = self._reductions[action.stage]
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            reduction.add_nothing()

    def _run_schedule(self, work: Work) -> float:
        """Run this rank's actions in order, and return the seconds that it waited for other stages."""
        share = work.share
        assert work.objective is not None
        batches = [self._precision.place_batch(batch) for _, batch in share.microbatches]
        self._stages.begin()
        self._cuts = [
            self._find_cut(work.objective, batch, self._drawing(work, samples))
            for batch, samples in zip(batches, share.samples, strict=True)
        ]
        schedule = self._stages.make_schedule(self._count_rounds(share))
        transfer = self._begin_transfer(schedule, len(batches), self._shared)
        actions = schedule.actions[self._pp.rank]
        divided = {(a.stage, a.microbatch) for a in actions if a.kind is ActionKind.WEIGHT}
        state = _Progress(work, batches, divided)
        num_flops, waited_s = 0.0, 0.0
        with ExitStack() as whole:
            if divided:
                whole.enter_context(deferring(self._deferrable, lambda: state.weights))
            for number, action in enumerate(actions):
                following = actions[number + 1] if number + 1 < len(actions) else None
                if action.microbatch >= len(batches):
                    self._join(action, following)
                    continue
                UNDER_WAY.action = action
                next_stage = None if following is None else following.stage
                for ahead in actions[number : number + 2]:
                    if ahead.microbatch >= len(batches):
                        continue
                    for message in list_needs(ahead, schedule.num_stages, self._shared):
                        transfer.expect(message)
                started_s = time.perf_counter()
                needs = {m: transfer.take(m) for m in list_needs(action, schedule.num_stages, self._shared)}
                waited_s += time.perf_counter() - started_s
                with ExitStack() as stack:
                    counter = None
                    if work.count_flops and action.microbatch == 0:
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                        counter = stack.enter_context(FlopCounter())
                    if self._shards is not None:
                        self._shards.gather(action.stage, next_stage)
                    if action.kind is ActionKind.FORWARD:
                        given = self._run_forward(state, action, needs)
                    elif action.kind is ActionKind.WEIGHT:
                        self._compute_weights(state, action)
                        given = {}
                    else:
                        given = self._run_backward(state, action, needs)
                    state.weights = None
                    if self._shards is not None:
                        self._shards.free(action.stage, next_stage)
                    for message, tensors in given.items():
                        transfer.give(message, tensors)
                if counter is not None:
                    num_flops += counter.get_total_flops()
        UNDER_WAY.action = None
        started_s = time.perf_counter()
        transfer.finish()
        if work.count_flops and batches:
            self._note_flops(num_flops, share)
            self._orders.clear()  # gradients of compiled blocks may lie otherwise than those counted eagerly
        self._cuts = []
        return waited_s + time.perf_counter() - started_s

    def _run_forward(
        self, state: _Progress, action: Action, needs: dict[Message, list[Tensor]]
    ) -> dict[Message, list[Tensor]]:
        """Run one stage's forward, and keep what its backward needs; return what it gives to others."""
        stage, number = action.stage, action.microbatch
        work, batch = state.work, state.batches[number]
        if self._experts is not None:
            self._experts.start_round(number)
        cut, index = self._cuts[number], work.share.microbatches[number][0]
        if (stage, number) in state.divided:
            state.weights = WeightGradients(cut.record.readers, self._excluded)
        crossing = cut.crossings[stage]
        received, gradients = receive(crossing, *needs.values())
        loss: Tensor | None = None
        assert work.objective is not None
        self._start(work, index, batch)
        with self._drawing(work, work.share.samples[number]):
            with self._precision.autocast():
                run = partial(work.objective.forward, batch)
                made, output = self._stages.build_run(cut, stage, received).compute(run)
            if stage + 1 == self._stages.num_stages:
                done: Loss = replace(work.objective, forward=lambda _: output)
                each = Round(index, batch, is_last=False)
                self.forward(replace(work, objective=done), each)
                loss = each.loss_sum
                if self.reports:
                    assert each.loss_sum is not None
                    assert each.weight is not None
                    work.launch.agreement.put_microbatch(index, each.loss_sum, each.weight)
                    if each.means is not None:
                        work.launch.agreement.add_statistics(
                            index, each.means, first=self._statistics.num_values
                        )
            self._report_stage_statistics(work, index)
        following = cut.crossings[stage + 1]
        outputs = [made[tensor.made] for tensor in following]
        roots = [tensor for tensor, each in zip(outputs, following, strict=True) if each.needs_grad]
        results = list_results(action, self._stages.num_stages, self._shared)
        state.kept[stage, number] = _Kept(gradients, roots, loss, state.weights)
        return dict.fromkeys(results, outputs)

    def _report_stage_statistics(self, work: Work, index: int) -> None:
        """Add the statistics of the layers that this stage has run to a microbatch; the others are zeros."""
        assert self._mesh is not None
        if self._mesh.tp.rank == 0 and self._mesh.cp.rank == 0 and self._statistics.num_values:
            work.launch.agreement.add_statistics(index, self._statistics.read_microbatch())

    def _run_backward(
        self, state: _Progress, action: Action, needs: dict[Message, list[Tensor]]
    ) -> dict[Message, list[Tensor]]:
        """Run one stage's backward, and set its gradients aside; return what it gives to others."""
        stage, number, work = action.stage, action.microbatch, state.work
        kept = state.kept.pop((stage, number))
        state.weights = kept.weights  # a block that is computed again keeps back the same
        roots, gradients = list(kept.made), []
        for message, tensors in needs.items():
            gradients += tensors
            if message.content is Payload.SHARED:
                # As a root it is added before the gradients of this stage's own uses, as in one process.
                roots.append(self._weights[message.name])
        self._stages.divide_rows(self._cuts[number])  # for blocks that are computed again
        with self._drawing(work, work.share.samples[number]):
            try:
                if kept.loss is not None:
                    assert not roots
                    index = work.share.microbatches[number][0]
                    self.backward(work, Round(index, None, is_last=False, loss_sum=kept.loss))
                elif roots:
                    with explaining_recompute():
                        torch.autograd.backward(roots, gradients)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise changed_error(f"{first_line(error)} (in the backward of stage {stage}).") from error
        given: dict[Message, list[Tensor]] = {}
        for message in list_results(action, self._stages.num_stages, self._shared):
            if message.content is Payload.SHARED:
                weight = self._weights[message.name]
                given[message] = [_gradient_of(weight)]
                weight.grad = None
            else:
                given[message] = [gradient.read() for gradient in kept.received]
        if self._experts is not None:
            self._experts.end_round(number, stage)
        gradients_of_stage = self._reductions[stage].take()
        if kept.weights is None:
            self._reductions[stage].put(work.share.microbatches[number][0], gradients_of_stage)
            self._start_sums()
        else:
            state.due[stage, number] = _Due(gradients_of_stage, kept.weights)
        return given

    def _compute_weights(self, state: _Progress, action: Action) -> None:
        """Compute the gradients that a backward has kept back, and set all of them aside."""
        due = state.due.pop((action.stage, action.microbatch))
        due.weights.compute()
        reduction = self._reductions[action.stage]
        # A weight is in one of both: all of its gradients are kept back, or none.
        both = zip(due.gradients, reduction.take(), strict=True)
        gradients = [first if late is None else late for first, late in both]
        reduction.put(state.work.share.microbatches[action.microbatch][0], gradients)
        self._start_sums()

    def _start_sums(self) -> None:
        """Start the sums of stages that are complete, in an order that is the same on all data ranks."""
        for reduction in list(self._reductions.values())[self._num_started :]:
            if not reduction.is_complete:
                return
            reduction.start_sum()
            self._num_started += 1

    def _spread_shared(self) -> None:
        """Send the sums for weights on several stages from the first of these stages to the others."""
        works = []
        for name, users in sorted(self._shared.items()):
            homes = list(dict.fromkeys(self._stages.homes[stage] for stage in users))
            if self._pp.rank not in homes:
                continue
            weight = self._weights[name]
            if self._shards is not None:
                weight = self._shards.shard(weight)
            if self._pp.rank == homes[0]:
                sent = local(_gradient_of(weight)).contiguous()
                works += [
                    (dist.isend(sent, group=self._pp.group, group_dst=peer), sent) for peer in homes[1:]
                ]
            else:
                own = local(weight.detach())
                found = torch.empty_like(own, memory_format=torch.contiguous_format)
                dist.recv(found, group=self._pp.group, group_src=homes[0])
                if self._shards is None:
                    weight.grad = found
                else:
                    self._shards.keep_gradient(self._weights[name], found)
        for work, _ in works:
            assert work is not None
            work.wait()

    def _note_flops(self, num_flops: float, share: Share) -> None:
        """Add up the operations of all stages in one microbatch."""
        total = torch.tensor(num_flops, dtype=torch.float64, device=self._precision.device)
        dist.all_reduce(total, group=self._pp.group)
        assert self._mesh is not None
        num_parts = self._mesh.layout.num_sample_parts // self._pp.size  # tp's ranks do equal parts
        self.flops_per_sample = (
            total.item() * num_parts / math.ceil(share.num_samples / share.num_microbatches)
        )

    def _propagate(self, work: Work, each: Round, scaled: Tensor, *, retain_graph: bool) -> float:
        scaled.backward()  # type: ignore[no-untyped-call]
        return 0.0


def _gradient_of(tensor: Tensor) -> Tensor:
    return nothing_like(tensor) if tensor.grad is None else tensor.grad.resolve_conj()
