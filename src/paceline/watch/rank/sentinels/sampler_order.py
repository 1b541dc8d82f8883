"""Follows the rounds that DistributedSamplers give, to see whether an order repeats."""

from __future__ import annotations

import operator
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.threads import Mark, mark_stack

_LEAST_PASSES = 2


@dataclass
class _Round:
    epoch: int
    passes: int
    indices: Any


@dataclass
class _Order:
    """The latest rounds of a sampler.

    Attributes:
        sampler: whose they are.
        shuffles: whether it does.
        last: the round before.
        trained: backward passes in the last one.
        is_regular: whether each round ended before the next began, so that passes belong to one.
        marks: the stack that began this one.
    """

    sampler: weakref.ref[Any]
    shuffles: bool
    now: _Round
    last: _Round | None = None
    trained: int = 0
    is_regular: bool = True
    marks: tuple[Mark, ...] = ()
    is_reported: bool = False


class Orders:
    """The samplers of this process.

    Attributes:
        has_split: whether one has divided its samples among ranks.
        has_repeated: whether one has begun a second round.
    """

    def __init__(self, gradients: Gradients, outbox: Outbox) -> None:
        self.has_split = False
        self.has_repeated = False
        self._gradients = gradients
        self._outbox = outbox
        self._orders: dict[int, _Order] = {}

    def begin_round(self, indices: Any, sampler: Any) -> None:
        """Take note that a sampler gives its samples once more.

        Args:
            indices: an iterator over a list.
            sampler: a `DistributedSampler`, or of a class that does not change its order.
        """
        self.has_split |= sampler.num_replicas > 1
        passes = self._gradients.passes
        begun = _Round(sampler.epoch, passes, indices)
        order = self._orders.get(id(sampler))
        if order is None or order.sampler() is not sampler:
            order = self._orders[id(sampler)] = _Order(weakref.ref(sampler), sampler.shuffle, begun)
        else:
            self.has_repeated = True
            # The reference count excludes a round that the script has left: `next(iter(loader))`.
            is_open = operator.length_hint(order.now.indices) > 0 and sys.getrefcount(order.now.indices) > 2
            order.is_regular &= not is_open
            order.trained = passes - order.now.passes
            order.last, order.now = order.now, begun
        order.marks = mark_stack(sys._getframe(2))

    def check(self) -> None:
        """Send what has been seen of rounds that have the same number; called by the watching thread."""
        for order in list(self._orders.values()):
            last, passes = order.last, self._gradients.passes - order.now.passes
            if order.is_reported or last is None or not (order.shuffles and order.is_regular):
                continue
            if last.epoch == order.now.epoch and min(order.trained, passes) >= _LEAST_PASSES:
                order.is_reported = True
                values = {"epoch": last.epoch, "passes": [order.trained, passes]}
                self._outbox.put("order", "", (), self._gradients.passes, order.marks, values)
