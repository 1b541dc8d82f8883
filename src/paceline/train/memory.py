"""Turns torch's out-of-memory errors into one that names the batch and the next move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.parallel.out_of_memory import is_out_of_memory
from paceline.world import World


@contextmanager
def explain_out_of_memory(share: Share | None, world: World) -> Iterator[None]:
    """Turn torch's out-of-memory errors into PL432 with the next move.

    Args:
        share: the microbatches being computed, for the message.
        world: of the rank that runs out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if not is_out_of_memory(error):
            raise
        text = str(error).partition("\n")[0][:200]
        what = ""
        if share is not None and share.num_microbatches:
            size = -(-share.num_samples // share.num_microbatches)
            what = f" with microbatches of {size} samples"
        raise PacelineError(
            "PL432",
            saw=f"rank {world.rank} ran out of memory on {world.device}{what}: {text}",
            rule="Weights, gradients, optimizer state and one microbatch's activations must fit.",
            fix="Lower microbatch_size (the global batch stays the same), or use a smaller model.",
        ) from error
