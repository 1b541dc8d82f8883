"""Chooses how often a state is kept in memory, from what it costs.

The cost of a state is the time by which it makes steps longer. The steps from its copy until the keepers hold
it are compared with the median of the steps in which nothing is copied. It is at least the time for which
training waited. All ranks choose the same, because they exchange their costs with each state.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from paceline.units import format_seconds

# Steps without a copy that are timed before the first state and after each `_EVERY_STATES`. They give a time
# to compare with, even if a state is kept at each step.
_QUIET_STEPS = 4
_EVERY_STATES = 8
_MAX_QUIET = 32
_MAX_COSTS = 9


class MemoryInterval:
    """The steps between two states in memory, if it follows from their cost.

    Attributes:
        steps: between two states now; `None` before it is known, or if the user gave it.
        cost_s: seconds that a state costs, as agreed by all ranks.
        step_s: seconds of a step without one.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self.cost_s = self.step_s = 0.0
        self._max_cost: float | None = None
        self._next_step: int | None = None
        self._quiet: deque[float] = deque(maxlen=_MAX_QUIET)
        self._costs: deque[float] = deque(maxlen=_MAX_COSTS)
        self._busy: list[float] = []
        self._stall_s = 0.0
        self._num_states = self._told = 0
        self._is_open = False
        self._end_s: float | None = None

    def is_due(self, step: int, max_cost: float | None) -> bool:
        """Return whether a state is to be kept after a step; the same on all ranks.

        Args:
            step: that was taken.
            max_cost: share of the step time that states may cost; without one, each is due.
        """
        self._max_cost = max_cost
        if max_cost is None:
            return True
        if self._next_step is None:
            self._next_step = step + _QUIET_STEPS
        return step >= self._next_step

    def add_stall(self, seconds: float) -> None:
        """Add time for which training waited because of a state."""
        self._stall_s += seconds

    def end_step(self, *, is_busy: bool) -> None:
        """Time a step.

        Args:
            is_busy: whether the keepers do not hold the last state yet.
        """
        now_s = time.perf_counter()
        seconds = None if self._end_s is None else now_s - self._end_s
        self._end_s = now_s
        if seconds is None:
            return
        if not self._is_open:
            self._quiet.append(seconds)
            return
        self._busy.append(seconds)
        if not is_busy:
            self._close()

    def read_costs(self) -> tuple[float, float] | None:
        """Return the seconds of a state and those of a step without one, or `None` before they are known.

        A state that is still being copied counts with the steps so far.
        """
        if self._is_open:
            self._close()
        if not self._costs or not self._quiet:
            return None
        return median(self._costs), median(self._quiet)

    def begin(self, step: int, costs: Sequence[tuple[float, float] | None]) -> None:
        """Begin a state, and choose the step of the next one.

        Args:
            step: that was taken.
            costs: by rank the result of `read_costs`.
        """
        self._is_open = True
        self._num_states += 1
        if self._max_cost is None:
            return
        interval = _QUIET_STEPS
        known = [each for each in costs if each is not None]
        if len(known) == len(costs):
            self.cost_s, self.step_s = max(known)
            limits = [cost_s / (self._max_cost * step_s) for cost_s, step_s in known]
            interval = self.steps = max(1, math.ceil(max(limits)))
        rest = _QUIET_STEPS if self._num_states % _EVERY_STATES == 0 else 0
        self._next_step = step + interval + rest

    def describe_change(self) -> str:
        """Return a sentence about the steps between states if they have changed by a quarter, else ""."""
        if self.steps is None or abs(self.steps - self._told) <= self._told / 4:
            return ""
        self._told = self.steps
        share = self.cost_s / (self.steps * self.step_s)
        return (
            f"A state stays in memory every {self.steps} steps. It costs {format_seconds(self.cost_s)}, "
            f"{share:.1%} of the time of these steps ({format_seconds(self.step_s)} each)."
        )

    def _close(self) -> None:
        """Note the cost of the state before; not of the first one, which gets memory and starts keepers."""
        if self._quiet and self._busy and self._num_states > 1:
            excess_s = sum(self._busy) - len(self._busy) * median(self._quiet)
            self._costs.append(max(excess_s, self._stall_s, 0.0))
        self._busy, self._stall_s, self._is_open = [], 0.0, False
