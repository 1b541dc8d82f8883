"""Parameters without a dimension (a scale, a temperature, a gate), which every rank of dp_shard keeps whole.

A number cannot be cut and costs little to keep. Each rank holds the parameter, its gradient and its optimizer
state, equal on all ranks. After the last round of a step one collective over dp per dtype sums the gradients:
by an all-reduce with the fast reduction; in the order of the tree of `comm/tree.py` with the exact one, so
that the bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.shard.gradient_exchange import StepProgress
from paceline.parallel.sums.gradient_sum import GradientSum, RankSum
from paceline.parallel.sums.gradients import Gradients, flatten, take_gradients


class WholeParameters:
    """The parameters of a model that dp_shard does not cut, and the sums of their gradients.

    Args:
        model: sharded; these are its parameters that are no DTensors.
        ranks: sums over the ranks of dp.
        apart: full names of parameters whose gradients are summed elsewhere.
    """

    def __init__(
        self, model: nn.Module, progress: StepProgress, ranks: RankSum, apart: Collection[str] = ()
    ) -> None:
        self._model = model
        self._apart = apart
        self._progress = progress
        self._any = bool(self._list())
        self._trained: list[nn.Parameter] = []
        self._sum = GradientSum(ranks, self._pack)
        self._reached: set[int] = set()

    def __bool__(self) -> bool:
        return self._any

    @property
    def used(self) -> set[int]:
        """The ids of the parameters that a microbatch of this rank has used in this step."""
        return self._reached

    def begin(self) -> None:
        """Start a step."""
        # Listed anew: a model on the meta device gets other objects when it is filled.
        named = self._list() if self._any else []
        check_hooks(named)
        self._trained = [parameter for _, parameter in named]
        self._reached = set()
        self._sum.begin(self._progress.num_owned, self._progress.turns)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Wrap the forward and backward of one round.

        In an idle round the parameters need no gradient, so that none is counted and no hook of a user runs.
        """
        idle = self._trained if self._progress.index is None else []
        for parameter in idle:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in idle:
                parameter.requires_grad_(True)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Keep the gradients of a round's backward; in the last round sum them over ranks."""
        if not self._trained:
            return
        if self._progress.index is not None:
            found = [p for p in self._trained if p.grad is not None]
            self._reached |= set(map(id, found))
            for parameter in found:
                assert parameter.grad is not None
                self._progress.apply_scale(parameter.grad)
            self._sum.add(self._progress.index, take_gradients(self._trained))
        if not self._progress.is_last:
            return
        empty: Gradients = [None] * len(self._trained)
        if self._progress.silent or not sum(self._progress.num_owned):
            values = [gradients for gradients in self._sum.take() if gradients is not None]
            totals = self._pack(values[-1] if values else empty)
        else:
            totals = self._sum.finish(empty)
        for (_, parameters), total in zip(self._by_type(), totals, strict=True):
            for parameter, gradient in zip(parameters, total.unbind(), strict=True):
                parameter.grad = gradient.clone()

    def _list(self) -> list[tuple[str, nn.Parameter]]:
        named = self._model.named_parameters()
        plain = [(name, p) for name, p in named if p.requires_grad and not isinstance(p, DTensor)]
        return [(name, p) for name, p in plain if name not in self._apart]

    def _by_type(self) -> list[tuple[list[int], list[nn.Parameter]]]:
        """Return the places and parameters of each type, whose gradients travel as one vector."""
        found: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self._trained):
            found.setdefault(parameter.dtype, []).append(place)
        return [(places, [self._trained[place] for place in places]) for places in found.values()]

    def _pack(self, gradients: Gradients) -> list[Tensor]:
        return [
            torch.cat([flatten(gradients[n], p) for n, p in zip(*each, strict=True)])
            for each in self._by_type()
        ]


@contextmanager
def split_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Split the groups of an optimizer inside the context, so that none mixes shards and whole parameters.

    Kernels that take a list of tensors (foreach, fused) refuse a mix of them. Changes that an optimizer makes
    to a group's settings are kept.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    split = [(group, _split_group(group)) for group in groups]
    optimizer.param_groups = [part for _, parts in split for part in parts]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, (first, *others) in split:
            if others:
                group.update({key: value for key, value in first.items() if key != "params"})


def _split_group(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the group itself, or a part for each kind if it has both."""
    shards = [p for p in group["params"] if isinstance(p, DTensor)]
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    if not shards or not whole:
        return [group]
    return [{**group, "params": shards}, {**group, "params": whole}]
