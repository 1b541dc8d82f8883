"""Runs forwards alone of a model that is cut into stages over `pp`: evaluation, and what a step needs too.

All microbatches go through one stage of a rank, then through its next one. A rank receives what crosses the
cut before its stage, and sends what crosses the cut behind it. The results are on the last stage's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.data.share import Share
from paceline.generators import seed_generators
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import ForwardBuffer, list_forward_buffers
from paceline.parallel.experts.shared import ExpertLayout
from paceline.parallel.objective import Objective
from paceline.parallel.order import LaidOut
from paceline.parallel.stages.cut import StageCut
from paceline.parallel.stages.received import receive
from paceline.parallel.stages.transfer import Form, StageTransfer, StrideOrders
from paceline.pipeline.messages import Message, Payload, list_needs, list_results
from paceline.pipeline.schedule import Action, ActionKind, Schedule
from paceline.pipeline.under_way import UNDER_WAY
from paceline.train.runners.runner import Runner

Result = TypeVar("Result")


class StagedForwards(Runner):
    """A runner of forwards of a model that is cut into stages.

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
        self._experts = laid_out.experts
        self._shards = laid_out.stages.shards
        # As they are in a step, whole.
        self._weights = {name: self._stages.whole(p) for name, p in model.named_parameters()}
        self._cuts: list[StageCut] = []
        self._orders: StrideOrders = {}

    @property
    def has_outputs(self) -> bool:
        return self._stages.num_stages - 1 in self._stages.own

    def list_kept(self) -> list[ForwardBuffer]:
        stages = self._stages
        names = {name for name in stages.kept if name not in stages.holders or stages.holds(name)}
        return [each for each in list_forward_buffers(self._model) if each.name in names]

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
        with self._whole():
            num_rounds = self._count_rounds(share)
            return self._run_forwards(objective, batches, indices, seed_of, around, num_rounds)

    def _run_forwards(
        self,
        objective: Objective[Result],
        batches: list[Any],
        indices: list[int],
        seed_of: Callable[[int], int],
        around: Callable[[int, Any], AbstractContextManager[None]],
        num_rounds: int,
    ) -> list[Result]:
        self._stages.begin()
        self._cuts = [
            self._find_cut(objective, batch, around(index, batch))
            for index, batch in zip(indices, batches, strict=True)
        ]
        schedule = _list_forwards(self._stages.homes, self._pp.size, num_rounds)
        transfer = self._begin_transfer(schedule, len(batches), {})
        results: list[Result] = []
        for stage, following in zip_longest(self._stages.own, self._stages.own[1:]):
            if self._shards is not None:  # also on a data rank without microbatches
                self._shards.gather(stage, following)
            for number, batch in enumerate(batches):
                action, cut = Action(ActionKind.FORWARD, stage, number), self._cuts[number]
                UNDER_WAY.action = action
                needs = [transfer.take(m) for m in list_needs(action, schedule.num_stages, {})]
                received, _ = receive(cut.crossings[stage], *needs)
                seed_generators(seed_of(indices[number]), self._precision.device)
                with around(indices[number], batch), self._precision.autocast():
                    run = partial(objective.forward, batch)
                    made, output = self._stages.build_run(cut, stage, received).compute(run)
                    if stage + 1 == schedule.num_stages:
                        results.append(objective.loss(output, batch))
                for message in list_results(action, schedule.num_stages, {}):
                    transfer.give(message, [made[tensor.made] for tensor in cut.crossings[stage + 1]])
            for number in range(len(batches), num_rounds):
                if self._experts is not None:
                    self._join_experts(self._experts, Action(ActionKind.FORWARD, stage, number))
            if self._shards is not None:
                self._shards.free(stage, following)
        UNDER_WAY.action = None
        transfer.finish()
        self._cuts = []
        return results

    # What a step needs too

    def _count_rounds(self, share: Share) -> int:
        """Return the number of microbatches of the step's schedule.

        If stages are gathered or gradients summed for each action, or data ranks share experts, ranks with
        fewer microbatches take part in the others' actions without microbatches of their own.
        """
        if self._shards is not None:
            return max(share.num_owned, default=0)
        if self._experts is not None:
            return self._experts.count_rounds(share.num_owned)
        return len(share.microbatches)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Make the parameters whole inside the context, gathering each when it is used."""
        if self._shards is None:
            yield
            return
        self._shards.enter()
        try:
            yield
        finally:
            self._shards.leave()

    def _join_experts(self, experts: ExpertLayout, action: Action) -> None:
        """Take part in the exchanges of tokens of an action of other data ranks."""
        if action.kind is ActionKind.FORWARD:
            experts.join_forward(self._precision.autocast, action.microbatch, action.stage)
        elif action.kind is not ActionKind.WEIGHT:
            experts.join_backward(self._precision.autocast, action.microbatch, action.stage)

    def _find_cut(
        self, objective: Objective[Any], batch: Any, drawing: AbstractContextManager[None]
    ) -> StageCut:
        self.is_trying = True
        try:
            with drawing, self._precision.autocast():
                return self._stages.find_cut(
                    batch, partial(objective.forward, batch), lambda output: objective.loss(output, batch)
                )
        finally:
            self.is_trying = False

    def _begin_transfer(
        self, schedule: Schedule, num_microbatches: int, shared: dict[str, tuple[int, ...]]
    ) -> StageTransfer:
        return StageTransfer(
            self._pp,
            schedule,
            num_microbatches,
            shared,
            self._describe,
            self._precision.device,
            self._orders,
        )

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
