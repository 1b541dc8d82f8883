"""Runs microbatches of a model whose ranks of dp_shard gather parameters in each forward.

All ranks of dp run as many rounds as the one with the most microbatches, because all of them take part in
each gather. A rank without a microbatch left runs an idle round: a borrowed microbatch, whose gradients do
not count. If the data ranks share experts too, it sends the tokens of this microbatch to them as well.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.share import Share
from paceline.mesh import Mesh
from paceline.parallel.order import LaidOut
from paceline.parallel.shard.marks import gradient_error
from paceline.train.batches import lend_batch
from paceline.train.runners.own_errors import one_backward_error, plain_under_experts_error
from paceline.train.runners.runner import Microbatch, Runner
from paceline.train.runners.work import IDLE, Round, Work


class ShardedRunner(Runner):
    """The runner of a model whose parameters are gathered.

    Args:
        name, model, mesh, settings: as for `Runner`; it always finds parameters that no microbatch used.
        laid_out: the result of laying out the model.
    """

    def __init__(self, name: str, model: nn.Module, laid_out: LaidOut, mesh: Mesh, **settings: Any) -> None:
        super().__init__(name, model, laid_out, mesh, **settings)
        assert laid_out.shards is not None
        assert self.used is not None
        self._shards = laid_out.shards
        self._experts = laid_out.experts
        self._dp = mesh.dp

    @property
    def silent(self) -> bool:
        return self._shards.silent

    @property
    def signature(self) -> int:
        return self._shards.signature

    def silenced(self) -> AbstractContextManager[None]:
        return self._shards.silenced()

    def step(self, optimizer: Optimizer) -> None:
        self._shards.step(optimizer)

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        super().close()

    def _rounds(self, work: Work) -> Generator[Round, None, None]:
        """Yield equally many microbatches on every rank, because all ranks gather in each forward."""
        share, shards, experts = work.share, self._shards, self._experts
        shards.begin(share.num_owned, share.turns)
        if not shards.num_rounds:
            work.launch.now()
            return
        if experts is not None:
            experts.begin(share.num_owned, idle_first=False, num_rounds=shards.num_rounds)
        lent = lend_batch(share, self._dp) if min(share.num_owned) < shards.num_rounds else None
        for number in range(shards.num_rounds):
            is_last = number == shards.num_rounds - 1
            index = share.microbatches[number][0] if number < len(share.microbatches) else None
            if experts is not None:
                experts.start_round(number)
            with (
                shards.synchronising(is_last, index),
                self._round(work, number, is_last=is_last, lent=lent) as each,
            ):
                yield each
            if is_last:
                self._agree(work)
            if experts is not None:
                experts.end_round(number)
        if experts is not None:
            experts.end()
        if not shards.silent:
            shards.check_reduced()

    def forward(self, work: Work, each: Round) -> None:
        with self._shards.explained():
            super().forward(work, each)

    def _propagate(self, work: Work, each: Round, scaled: Tensor, *, retain_graph: bool) -> float:
        self._shards.scale = each.scale
        return self._shards.backward(scaled)

    def _begin_own(self, each: Round) -> None:
        self._shards.scale = each.scale

    def _has_computed(self, each: Round) -> bool:
        return each.num_backwards > 0

    def _before_own_backward(self, each: Round, loss: Tensor, options: Mapping[str, Any]) -> Tensor:
        if each.num_backwards or options.get("retain_graph"):
            raise one_backward_error(
                "ran a second backward in one microbatch, or one with retain_graph=True."
            )
        if options.get("create_graph"):
            raise gradient_error("backward(create_graph=True).")
        if self._experts is not None and not each.is_explicit:
            raise plain_under_experts_error()
        each.num_backwards += 1
        return loss if each.is_explicit else self._shards.tie_loss(loss)

    def _end_own(self, each: Round) -> None:
        if not each.num_backwards:
            raise one_backward_error("ran no backward in a microbatch (`continue`, or another branch).")

    def _agree(self, work: Work) -> None:
        """Start the agreement; the shards know the used ones, as unused ones get gradients of zeros too."""
        assert self.used is not None
        apart = set() if self._experts is None else {id(p) for p in self._experts.parameters}
        self.used[:] = [id(p) in self._shards.used or id(p) in apart for p in self._trained]
        work.launch.now()

    def _list_leaves(self) -> list[Tensor]:
        return [*super()._list_leaves(), *self._shards.list_gathered()]

    def _list_microbatches(self, share: Share) -> list[Microbatch]:
        own = super()._list_microbatches(share)
        if len(set(share.num_owned)) == 1:
            return own
        return own + [(IDLE, lend_batch(share, self._dp))] * (max(share.num_owned) - len(own))
