"""Runs microbatches of replicas that share the experts of their mixtures.

The ranks of ep run equally many rounds, because each of them has experts that the others' tokens need. A rank
with fewer microbatches runs idle rounds first, without tokens. So all ranks run their last microbatch, in
which the replicas sum gradients, in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.share import Share
from paceline.mesh import Mesh
from paceline.parallel.objective import Objective
from paceline.parallel.order import LaidOut
from paceline.train.runners.own_errors import plain_under_experts_error
from paceline.train.runners.runner import Result
from paceline.train.runners.whole import WholeRunner
from paceline.train.runners.work import Round, Work


class RoutedRunner(WholeRunner):
    """The runner of a model whose experts are on other ranks too.

    Args:
        name, model, mesh, settings: as for `Runner`.
        laid_out: the result of laying out the model.
    """

    def __init__(
        self, name: str, model: nn.Module, laid_out: LaidOut, mesh: Mesh | None, **settings: Any
    ) -> None:
        super().__init__(name, model, laid_out, mesh, **settings)
        assert laid_out.experts is not None
        self._experts = laid_out.experts

    def close(self) -> None:
        self._experts.close()
        super().close()

    def _rounds(self, work: Work) -> Generator[Round, None, None]:
        """Yield the rank's own microbatches after its idle rounds, and sum the experts' gradients."""
        self._experts.begin(work.share.num_owned, idle_first=True)
        for number in range(self._count_idle(work.share)):
            self._experts.join_forward(self._precision.autocast, number)
            self._experts.join_backward(self._precision.autocast, number)
        self._experts.start_round(self._count_idle(work.share))
        for each in super()._rounds(work):
            yield each
            self._experts.end_round(self._experts.number)
            self._experts.start_round(self._experts.number + 1)
        self._experts.end()

    def _before_own_backward(self, each: Round, loss: Tensor, options: Mapping[str, Any]) -> Tensor:
        if not each.is_explicit:
            raise plain_under_experts_error()
        return super()._before_own_backward(each, loss, options)

    @torch.no_grad()
    def _forward_all(
        self,
        objective: Objective[Result],
        share: Share,
        seed_of: Callable[[int], int],
        around: Callable[[int, Any], AbstractContextManager[None]],
    ) -> list[Result]:
        for number in range(self._count_idle(share)):
            self._experts.join_forward(self._precision.autocast, number)
        return super()._forward_all(objective, share, seed_of, around)

    def _count_idle(self, share: Share) -> int:
        return self._experts.count_rounds(share.num_owned) - len(share.microbatches)
