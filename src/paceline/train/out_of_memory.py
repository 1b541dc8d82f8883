"""Turns torch's out-of-memory errors into one that names what filled the memory and the next move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.memory.account_report import account_for
from paceline.memory.account_words import describe_remedy, describe_without_remedies
from paceline.memory.advice import MemorySettings, list_remedies
from paceline.memory.steps import STEPS
from paceline.memory.torch_errors import is_out_of_memory
from paceline.recipe.layout import Layout
from paceline.world import World

_FIX = "Lower microbatch_size (the global batch stays the same), or use a smaller model."
_MANY_REMEDIES = 3


class MemoryErrors:
    """The explanation of errors for exhausted memory in a trainer's steps.

    Args:
        world: of the rank that runs out of memory.
    """

    def __init__(self, world: World, layout: Layout, dtype: str) -> None:
        self._world = world
        self._settings = MemorySettings(0, layout.recompute != "none", dtype, layout.dp)
        STEPS.install(torch)

    @contextmanager
    def explained(self, share: Share | None) -> Iterator[None]:
        """Turn torch's out-of-memory errors into PL432: what filled the memory, what would have fitted.

        Args:
            share: the microbatches being computed, for the message.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0][:200]
            size = 0
            if share is not None and share.num_microbatches:
                size = -(-share.num_samples // share.num_microbatches)
            what = f" with microbatches of {size} samples" if size else ""
            fix = _FIX
            account = account_for(error, self._world.rank)
            if account is not None:
                text += f"\n{describe_without_remedies(account)}"
                remedies = list_remedies(account, replace(self._settings, microbatch_size=size))
                words = [describe_remedy(one) for one in remedies[:_MANY_REMEDIES]]
                fix = f"Use {' Or '.join(words)}" if words else fix
            raise PacelineError(
                "PL432",
                saw=f"rank {self._world.rank} ran out of memory on {self._world.device}{what}: {text}",
                rule="Weights, gradients, optimizer state and one microbatch's activations must fit.",
                fix=fix,
            ) from error
