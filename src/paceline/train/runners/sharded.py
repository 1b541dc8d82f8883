"""Runs microbatches of a model whose ranks of dp_shard gather parameters in each forward.

All ranks of dp run as many rounds as the one with the most microbatches, because all of them take part in
each gather. A rank without a microbatch left runs an idle round: a borrowed microbatch, whose gradients do
not count. If the data ranks share experts too, it sends the tokens of this microbatch to them as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.share import Share
from paceline.mesh import Mesh
from paceline.parallel.compress import Compression
from paceline.parallel.objective import Loss
from paceline.parallel.order import LaidOut
from paceline.train.batches import count_samples, lend_batch
from paceline.train.runners.runner import IDLE, Microbatch, Runner
from paceline.train.runners.work import Work


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
    def gradient_scale(self) -> float:
        return self._shards.gradient_scale

    @property
    def compression(self) -> Compression | None:
        return self._shards.compression

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

    def adopt_state(self, optimizer: Optimizer) -> None:
        self._shards.offload_state(optimizer)

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
        super().close()

    def _run_rounds(self, work: Work, *, count_flops: bool) -> float:
        """Run equally many rounds on every rank, because all ranks gather parameters in each forward."""
        share, shards, comm_s = work.share, self._shards, 0.0
        shards.begin(share.num_owned)
        if not shards.num_rounds:
            work.launch.now()
            return 0.0
        if self._experts is not None:
            self._experts.begin(share.num_owned, idle_first=False, num_rounds=shards.num_rounds)
        lent = None
        if min(share.num_owned) < shards.num_rounds:
            lent = lend_batch(share, self._dp)
        for number in range(shards.num_rounds):
            is_last = number == shards.num_rounds - 1
            is_own = number < len(share.microbatches)
            if self._experts is not None:
                self._experts.start_round(number)
            with shards.synchronising(is_last, share.microbatches[number][0] if is_own else None):
                if is_own:
                    with self._counting_flops(share) if count_flops and number == 0 else nullcontext():
                        comm_s += self._run_microbatch(work, number, is_last=is_last)
                else:
                    comm_s += self._run_idle(work, lent, is_last=is_last)
            if self._experts is not None:
                self._experts.end_round(number)
        if self._experts is not None:
            self._experts.end()
        if not shards.silent:
            shards.check_reduced()
        return comm_s

    def _run_idle(self, work: Work, batch: Any, *, is_last: bool) -> float:
        """Run a round without a microbatch of this rank's own: its loss does not count."""
        batch = self._start(work, "idle", batch)
        with self._drawing(work, range(count_samples(batch))):
            with self._precision.autocast():
                loss_sum, _ = self._compute(work.objective, batch)
            comm_s = self._backward(loss_sum, work.unit)
        self._after_backward(work, is_last=is_last)
        return comm_s

    def _compute(self, objective: Loss, batch: Any) -> tuple[Tensor, Tensor]:
        return self._shards.forward(objective, batch)

    def _propagate(self, scaled: Tensor) -> float:
        return self._shards.backward(scaled)

    def _list_leaves(self) -> list[Tensor]:
        return [*super()._list_leaves(), *self._shards.list_gathered()]

    def _before_backward(self, work: Work, *, is_last: bool) -> None:
        """Do nothing: the used parameters are known only after backward."""

    def _after_backward(self, work: Work, *, is_last: bool) -> None:
        """Read the used parameters from the shards, because unused parameters get gradients of zeros too."""
        if is_last:
            assert self.used is not None
            apart = set() if self._experts is None else {id(p) for p in self._experts.parameters}
            self.used[:] = [id(p) in self._shards.used or id(p) in apart for p in self._trained]
            work.launch.now()

    def _list_microbatches(self, share: Share) -> list[Microbatch]:
        own = super()._list_microbatches(share)
        if len(set(share.num_owned)) == 1:
            return own
        return own + [(IDLE, lend_batch(share, self._dp))] * (max(share.num_owned) - len(own))
