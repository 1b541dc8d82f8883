"""Out of memory, told as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.world import World

_CPU_MESSAGES = ("can't allocate memory", "not enough memory")


@contextmanager
def explain_out_of_memory(share: Share | None, world: World) -> Iterator[None]:
    """Turns torch's out-of-memory errors into PL432 with the next move.

    Args:
        share: the microbatches being computed, for the message.
        world: whose rank it happens on.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_memory and not any(message in text for message in _CPU_MESSAGES):
            raise
        what = ""
        if share is not None and share.num_microbatches:
            size = -(-share.num_samples // share.num_microbatches)
            what = f" with microbatches of {size} samples"
        raise PacelineError(
            "PL432",
            saw=f"rank {world.rank} ran out of memory on {world.device}{what}: {text.splitlines()[0][:200]}",
            rule="Weights, gradients, optimizer state and one microbatch's activations must fit.",
            fix="Lower microbatch_size (the global batch stays the same), or use a smaller model.",
        ) from error
