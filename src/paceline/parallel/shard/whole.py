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
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.exchange import Exchange, nothing_like
from paceline.comm.tree import TreeSum
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.shard.gradient_exchange import StepProgress


class WholeParameters:
    """The parameters of a model that dp_shard does not cut, and the sums of their gradients.

    Args:
        model: sharded; these are its parameters that are no DTensors.
        rounds: of this model.
        group: the ranks of dp.
        exchange: sums in the order of the tree; `None` for the fast reduction.
        apart: full names of parameters whose gradients are summed elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: StepProgress,
        group: dist.ProcessGroup,
        exchange: Exchange | None,
        apart: Collection[str] = (),
    ) -> None:
        self._model = model
        self._apart = apart
        self._rounds = rounds
        self._group = group
        self._exchange = exchange
        self._any = bool(self._list())
        self._trained: list[tuple[str, nn.Parameter]] = []
        self._sums: dict[torch.dtype, TreeSum[Tensor]] = {}
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
        self._trained = self._list() if self._any else []
        check_hooks(self._trained)
        self._reached = set()
        num_leaves = 0 if self._rounds.plan is None else self._rounds.plan.num_leaves
        self._sums = {p.dtype: TreeSum(num_leaves, _add) for _, p in self._trained}

    @contextmanager
    def round(self) -> Iterator[None]:
        """Wrap the forward and backward of one round.

        In an idle round the parameters need no gradient, so that none is counted and no hook of a user runs.
        """
        idle = self._trained if self._rounds.index is None else []
        for _, parameter in idle:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for _, parameter in idle:
                parameter.requires_grad_(True)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Keep the gradients of a round's backward; in the last round sum them over ranks."""
        if not self._trained:
            return
        if self._rounds.index is not None:
            self._reached |= {id(p) for _, p in self._trained if p.grad is not None}
            if self._exchange is not None:
                self._set_aside(self._rounds.index)
        if self._rounds.is_last:
            self._sum()

    def _list(self) -> list[tuple[str, nn.Parameter]]:
        named = self._model.named_parameters()
        plain = [(name, p) for name, p in named if p.requires_grad and not isinstance(p, DTensor)]
        return [(name, p) for name, p in plain if name not in self._apart]

    def _of(self, dtype: torch.dtype) -> list[nn.Parameter]:
        return [p for _, p in self._trained if p.dtype == dtype]

    def _set_aside(self, index: int) -> None:
        """Move a microbatch's gradients from the parameters to the sums."""
        for dtype, total in self._sums.items():
            parameters = self._of(dtype)
            total.push((index, index + 1), _flatten(parameters))
            for parameter in parameters:
                parameter.grad = None

    def _sum(self) -> None:
        for dtype, total in self._sums.items():
            parameters = self._of(dtype)
            flat = _flatten(parameters)
            if self._exchange is None:
                if not self._rounds.silent:
                    dist.all_reduce(flat, group=self._group)
            else:
                flat = self._add_up([value for _, value in total.subtrees], flat)
            for parameter, gradient in zip(parameters, flat.unbind(), strict=True):
                parameter.grad = gradient.clone()

    def _add_up(self, subtrees: list[Tensor], scratch: Tensor) -> Tensor:
        assert self._exchange is not None
        assert self._rounds.plan is not None
        total = subtrees[-1] if subtrees else scratch
        if not self._rounds.silent and self._rounds.plan.num_leaves:
            self._exchange.sum_subtrees([[subtree] for subtree in subtrees], self._rounds.plan, total)
        return total


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


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """Return their gradients as one vector; a missing one adds nothing, not even the sign of a zero."""
    missing = nothing_like(parameters[0])
    return torch.stack([missing if p.grad is None else p.grad for p in parameters])


def _add(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum, computed in place of `right`."""
    return right.add_(left)
