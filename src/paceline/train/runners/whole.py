"""Runs microbatches of a model that is not sharded over dp: one process, or replicas.

A rank runs only its own microbatches, and gradients are summed over the replicas in the last one. A rank
that owns none joins that sum with zeros.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.mesh import Mesh
from paceline.parallel.compress import Compression
from paceline.parallel.order import LaidOut
from paceline.parallel.placement import local
from paceline.parallel.sums.gradients import settle_conjugates
from paceline.torch_seams.operators import multiply_each
from paceline.torch_seams.tensors import read_version
from paceline.train.runners.own_errors import summed_already_error
from paceline.train.runners.runner import Runner
from paceline.train.runners.work import Round, Work


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
        # In a loop of the user's own: gradients before a microbatch, and versions of the summed ones.
        self._held: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        if self.used is not None:
            for number, parameter in enumerate(self._trained):
                # Without this object: DDP holds the parameter, and it the hook, where Python sees no circle.
                mark = partial(_mark, self.used, number)
                parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    @property
    def silent(self) -> bool:
        return self._replica is not None and self._replica.silent

    @property
    def compression(self) -> Compression | None:
        return None if self._exact is None else self._exact.ranks.compression

    def silenced(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replica is None else self._replica.silenced()

    def agree_on_used(self) -> list[bool]:
        left_out = {id(parameter) for parameter in self._left_out}
        used = [id(parameter) not in left_out for parameter in self._trained]
        counts = torch.tensor(used, dtype=torch.int32, device=self._precision.device)
        assert self._mesh is not None
        dist.all_reduce(counts, group=self._mesh.group)
        return [count > 0 for count in counts.tolist()]

    def _rounds(self, work: Work) -> Generator[Round, None, None]:
        """Yield the rank's own microbatches; the backward of the last one sums gradients over replicas."""
        share = work.share
        sums = self.is_talking and self._replica is not None
        if self._exact is not None:
            self._exact.begin(share.num_owned)
        is_reduced = False
        for number in range(len(share.microbatches)):
            is_last = number == len(share.microbatches) - 1
            with self._round(work, number, is_last=is_last) as each:
                yield each
            is_reduced = each.is_reduced
            if self._exact is not None and not (sums and is_last):
                self._exact.set_aside(each.index)
        if sums and not is_reduced:
            self.waited_s += self._sum_over_ranks(work, None)
        if not work.launch.is_done:
            self._agree(work) if sums else work.launch.now()
        if self._exact is not None:
            self._exact.end(reduced=sums)

    def _propagate(self, work: Work, each: Round, scaled: Tensor, *, retain_graph: bool) -> float:
        is_alone = self._replica is None or self.silent
        if is_alone or not each.is_last or retain_graph or not each.scale:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return 0.0
        each.is_reduced = True
        if not work.adds_late:
            self._report(work, each)
        self._add_held()
        if self._exact is not None and self.used is not None:
            self._exact.fill_missing()
        waited_s = self._sum_over_ranks(work, scaled)
        self._versions = [read_version(p.grad) for p in self._trained if p.grad is not None]
        return waited_s

    def _begin_own(self, each: Round) -> None:
        if self._exact is None:  # gradients of earlier microbatches are scaled already
            self._held = [(p, p.grad) for p in self._trained if p.grad is not None]
            for parameter, _ in self._held:
                parameter.grad = None

    def _has_computed(self, each: Round) -> bool:
        return any(p.grad is not None for p in self._trained)

    def _end_own(self, each: Round) -> None:
        if each.is_reduced:
            if self._versions != [read_version(p.grad) for p in self._trained if p.grad is not None]:
                raise summed_already_error()
            return
        assert each.weight is not None
        settle_conjugates(self._trained)
        gradients = [local(p.grad) for p in self._trained if p.grad is not None]
        if not gradients or not each.weight:  # left out: not even the mean over no targets counts
            each.weight = torch.zeros((), dtype=torch.float64)
            for parameter in self._trained:
                parameter.grad = None
        elif each.scale != 1.0:
            multiply_each(gradients, each.scale)
        self._add_held()

    @torch.no_grad()
    def _add_held(self) -> None:
        for parameter, held in self._held:
            parameter.grad = held if parameter.grad is None else held.add_(parameter.grad)
        self._held = []

    def _sum_over_ranks(self, work: Work, scaled: Tensor | None) -> float:
        """Sum the gradients over replicas, during the backward of a loss if there is one.

        The agreement starts once the parameters are known that this rank has not used.
        """
        replica, used = self._replica, self.used
        assert replica is not None
        agreeing = partial(self._agree, work) if used is None and not work.adds_late else None
        if scaled is not None:
            waited_s = replica.backward(scaled, agreeing)
        else:
            kept = None if used is None else list(used)
            waited_s = replica.send(agreeing)
            if used is not None and kept is not None:
                used[:] = kept  # backward of zeros does not count as a use
        if used is not None and not work.adds_late:
            work.launch.now()
        return waited_s

    def _agree(self, work: Work) -> None:
        """Start the agreement, after all gradients of this rank are computed."""
        if self.used is None:
            assert self._replica is not None
            self._left_out = self._replica.left_out
            if self._exact is not None:
                self._left_out = [p for p in self._left_out if not self._exact.is_used(p)]
        work.launch.now(leaves_out=bool(self._left_out))


def _mark(used: list[bool], number: int, _parameter: Tensor) -> None:
    used[number] = True
