"""Counts the choices of routers over a global batch, and moves their bias once per step.

The counts of each microbatch are whole numbers. They are part of the step's agreement, in which their sums
are exact. So every rank moves the bias of every mixture by the same amount, whatever microbatches and stages
it has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.models.moe import Balance


class Choices:
    """The choices of all routers of some modules; see `RunningStatistics` for the order of calls.

    Attributes:
        fullest: the share of the last step's choices that the fullest expert got, a mean over the mixtures;
            `None` without mixtures.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self.fullest: float | None = None

    @cached_property
    def _balances(self) -> list[Balance]:
        # Listed at the first step, because laying out a model may replace modules.
        inner = [each for module in self._modules for each in module.modules()]
        return [each for each in inner if isinstance(each, Balance)]

    @property
    def num_values(self) -> int:
        """The count of numbers per microbatch: one per expert of every mixture."""
        return sum(each.num_experts for each in self._balances)

    def start_microbatch(self) -> None:
        """Count from zero."""
        for each in self._balances:
            each.counts = None

    def read_microbatch(self) -> Tensor:
        """Return the counts of a microbatch: float64 of length `num_values`; 0 for mixtures not run here."""
        made = next((each.counts.device for each in self._balances if each.counts is not None), None)
        parts = [
            torch.zeros(each.num_experts, dtype=torch.float64, device=made)
            if each.counts is None
            else each.counts.double()
            for each in self._balances
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def merge(self, rows: Tensor) -> None:
        """Move the biases by the counts of all microbatches.

        Args:
            rows: float64 of shape (number of microbatches, `num_values`), the same on every rank.
        """
        total, lengths = rows.sum(0).long(), [each.num_experts for each in self._balances]
        sums, own = torch.split(total, lengths), (kept for each in self._balances for kept in each.buffers())
        if (first := next(own, total)).is_cuda:
            total = total.pin_memory().to(first.device, non_blocking=True)  # a plain copy waits for it
        for each, counts in zip(self._balances, torch.split(total, lengths), strict=True):
            each.move(counts)
        shares = [int(counts.max()) / max(1, int(counts.sum())) for counts in sums]
        self.fullest = sum(shares) / len(shares) if shares else None
