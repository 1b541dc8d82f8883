"""Keeps states of a recipe's run in memory, as often as `checkpoint.memory_every` sets.

A number is a demand: whatever makes it impossible ends the run (PL561, PL562). `"auto"`, the default, must
harm no run, so it keeps states only if all of this holds:

- The launcher may start these ranks again (`--max-restarts`); else nobody would use the states.
- The run has lasted for a minute; a restart before repeats less than that.
- The states take at most a quarter of the free memory of each node.
- They cost less than 1% of the step time, as measured (`train/state/memory_interval.py`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Literal, Protocol

from paceline.errors import PacelineError
from paceline.train.state.memory_saves import IMPOSSIBLE, may_restart
from paceline.train.state.transfer import gather
from paceline.world import World

log = logging.getLogger(__name__)

# Share of the step time that states may cost, and of a node's free memory that they may take, with "auto".
MAX_COST, MAX_MEMORY = 0.01, 0.25
# Age of a run at its first state with "auto", and the first step after which its age is looked at.
_FIRST_S = 60.0
_FIRST_LOOK = 4


class KeepState(Protocol):
    """A function such as `Trainer.save_to_memory`; collective."""

    def __call__(self, max_cost: float | None = None, max_memory: float = 1.0) -> bool:
        """Keep the state, if it is due."""


class MemoryStates:
    """The states that a run keeps in memory; all methods are collective.

    Args:
        world: the ranks.
        every: of the recipe, `checkpoint.memory_every`.
        keep: keeps the state of the last step.
    """

    def __init__(self, world: World, every: int | Literal["auto"], keep: KeepState) -> None:
        self._world, self._every, self._keep = world, every, keep
        self._is_on = every != 0
        self._begin_s = time.monotonic()
        self._num_steps, self._next_look = 0, _FIRST_LOOK
        self._is_old = False
        if self._is_on:
            restarts = all(gather(world, may_restart(os.environ)))
            self._is_on = restarts or every != "auto"
            has_launcher = "TORCHELASTIC_RUN_ID" in os.environ  # else the first state is refused
            if self._is_on and not restarts and has_launcher and world.is_main and world.num_nodes == 1:
                log.warning(
                    "checkpoint.memory_every = %s: states in memory are used only if the launcher starts "
                    "ranks again, and it does not (--max-restarts). [PL561]",
                    every,
                )

    def after(self, step: int) -> None:
        """Keep the state after a step that is not saved to the disk, if it is due."""
        if not self._is_on:
            return
        if self._every == "auto":
            self._num_steps += 1
            if self._is_old or self._look():
                self._try_to_keep()
        elif step % self._every == 0:
            self._keep()

    def _look(self) -> bool:
        """Return whether the run is old enough; ranks exchange its age only at a few steps."""
        if self._num_steps < self._next_look:
            return False
        age_s = min(gather(self._world, time.monotonic() - self._begin_s))
        self._is_old = age_s >= _FIRST_S
        if not self._is_old:
            missing_steps = (_FIRST_S - age_s) * self._num_steps / max(age_s, 1e-9)
            self._next_look = self._num_steps + max(1, math.ceil(missing_steps))
        return self._is_old

    def _try_to_keep(self) -> None:
        try:
            self._keep(MAX_COST, MAX_MEMORY)
        except PacelineError as error:
            if error.code not in IMPOSSIBLE:
                raise
            self._is_on = False
            if self._world.is_main:
                log.warning(
                    "No states are kept in memory: %s A restart resumes from the newest checkpoint. "
                    "checkpoint.memory_every = 0 turns this message off. [%s]",
                    error.saw,
                    error.code,
                )
