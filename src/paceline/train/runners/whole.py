"""Runs microbatches of a model that is not sharded over dp: one process, or replicas.

A rank runs only its own microbatches, and gradients are summed over the replicas in the last one. A rank
that owns none joins that sum with zeros.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.mesh import Mesh
from paceline.parallel.compress import Compression
from paceline.parallel.hook_state import HookState
from paceline.parallel.objective import Loss
from paceline.parallel.order import LaidOut
from paceline.train.runners.runner import Runner
from paceline.train.runners.work import Launch, Work


class WholeRunner(Runner):
    """The runner of a model whose parameters are not gathered.

    Args:
        name, model, mesh, settings: as for `Runner`.
        laid_out: the result of laying out the model: replicas or not, exact or fast.
    """

    def __init__(
        self, name: str, model: nn.Module, laid_out: LaidOut, mesh: Mesh | None, **settings: Any
    ) -> None:
        super().__init__(name, model, laid_out, mesh, **settings)
        self._replica = laid_out.replica
        self._exact = laid_out.exact
        # The trained parameters that no microbatch of this rank has used, if `used` is not tracked.
        self._left_out: list[Tensor] = []
        if self.used is not None:
            self._watch_use()

    @property
    def gradient_scale(self) -> float:
        return 1.0 if self._replica is None else self._replica.gradient_scale

    @property
    def silent(self) -> bool:
        return self._replica is not None and self._replica.silent

    @property
    def hook_state(self) -> HookState | None:
        return None if self._replica is None else self._replica.hook_state

    @property
    def is_graph_static(self) -> bool:
        return self._replica is not None and self._replica.is_graph_static

    @property
    def compression(self) -> Compression | None:
        return None if self._exact is None else self._exact.ranks.compression

    def silenced(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replica is None else self._replica.silenced()

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Do nothing: the state already is on its device."""

    def agree_on_used(self) -> list[bool]:
        left_out = {id(parameter) for parameter in self._left_out}
        used = [id(parameter) not in left_out for parameter in self._trained]
        counts = torch.tensor(used, dtype=torch.int32, device=self._precision.device)
        dist.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def close(self) -> None:
        if self._exact is not None:
            self._exact.close()
        super().close()

    def _run_rounds(self, work: Work, *, count_flops: bool) -> float:
        """Run the rank's own microbatches; the last one reduces gradients during its backward."""
        share, comm_s = work.share, 0.0
        sums = self.is_talking and self._replica is not None
        if self._exact is not None:
            self._exact.begin(share.num_owned)
        for number in range(len(share.microbatches)):
            index, is_last = share.microbatches[number][0], number == len(share.microbatches) - 1
            counting = self._counting_flops(share) if count_flops and number == 0 else nullcontext()
            with counting, self._synchronising(work.launch, is_last):
                comm_s += self._run_microbatch(work, number, is_last=is_last)
            if self._exact is not None and (not sums or not is_last):
                self._exact.set_aside(index)
        if not share.microbatches:
            comm_s += self._run_nothing(work.launch)
        if not work.launch.is_done:
            work.launch.now()
        if sums and self.used is None:
            assert self._replica is not None
            self._replica.check_reduced()
        if self._exact is not None:
            self._exact.end(reduced=sums)
        return comm_s

    def _compute(self, objective: Loss, batch: Any) -> tuple[Tensor, Tensor]:
        return objective(batch) if self._replica is None else self._replica.forward(objective, batch)

    def _propagate(self, scaled: Tensor) -> float:
        if self._replica is not None:
            return self._replica.backward(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        return 0.0

    def _before_backward(self, work: Work, *, is_last: bool) -> None:
        if not is_last:
            return
        if self._replica is None:
            if self.used is None:
                work.launch.now()
        elif self._exact is not None and self.used:
            self._exact.fill_missing()

    def _after_backward(self, work: Work, *, is_last: bool) -> None:
        if is_last and self.used is not None:
            work.launch.now()

    def _synchronising(self, launch: Launch, is_last: bool) -> AbstractContextManager[None]:
        """Return a microbatch's context; the last one starts the agreement once the unused are known."""
        if self._replica is None:
            return nullcontext()
        replica = self._replica

        def agree() -> None:
            self._left_out = list(replica.left_out if replica.is_used else replica.trained)
            if self._exact is not None:
                self._left_out = [p for p in self._left_out if not self._exact.is_used(p)]
            launch.now(leaves_out=bool(self._left_out))

        return replica.synchronising(is_last, agree if self.used is None else None)

    def _run_nothing(self, launch: Launch) -> float:
        """Join the collectives of a step in which this rank owns no microbatch, in their order."""
        if self._replica is None:
            launch.now()
            return 0.0
        with self._synchronising(launch, True):
            # The forward comes first, as on other ranks: DDP's forward has collectives (buffers, and the new
            # order of the buckets in the second step).
            zero = self._replica.forward_nothing()
            comm_s = self._replica.backward(zero)
        if self.used is not None:
            self.used[:] = [False] * len(self.used)  # backward of zeros does not count as a use
            launch.now()
        return comm_s

    def _watch_use(self) -> None:
        for number, parameter in enumerate(self._trained):

            def mark(_parameter: Tensor, number: int = number) -> None:
                assert self.used is not None
                self.used[number] = True

            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
