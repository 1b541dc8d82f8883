"""The states of communication hooks in checkpoints: one per rank, restored on the same number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.parallel.hook_state import gather_hook_state, scatter_hook_state
from paceline.train.update import Update

Saved = dict[str, dict[str, Any]]


def gather_hooks(updates: Mapping[str, Update], bucket_cap_mb: float) -> Saved:
    """Gather every rank's hook state on rank 0 for a checkpoint, by model; collective.

    Args:
        updates: of the trainer.
        bucket_cap_mb: hooks count their state by bucket.

    Raises:
        PacelineError: PL516 for a state that cannot be copied.
    """
    return {
        name: {"bucket_cap_mb": bucket_cap_mb, "states": gather_hook_state(update.hook_state)}
        for name, update in updates.items()
        if update.hook_state is not None
    }


def check_hooks(saved: Saved, world_size: int, bucket_cap_mb: float) -> None:
    """Raise PL516 unless the checkpoint has a state for every rank of this start; on rank 0.

    Args:
        saved: the result of `gather_hooks`.
        world_size: ranks of this start.
        bucket_cap_mb: of this start.
    """
    for name, record in saved.items():
        there = (len(record["states"]), record["bucket_cap_mb"])
        if there != (world_size, bucket_cap_mb):
            raise PacelineError(
                "PL516",
                saw=f"the checkpoint has the state of the communication hook of {name} for {there[0]} "
                "ranks with "
                f"ddp.bucket_cap_mb={there[1]:g}; here are {world_size} with {bucket_cap_mb:g}.",
                rule="A hook that compresses keeps on each rank what it has left out there, by bucket. On "
                "other ranks or in other buckets, that state would be lost, and the run would continue "
                "differently.",
                fix="Go on with the same ranks and buckets. To begin with an empty state instead: "
                "trainer.resume(folder, accept=['comm_hook']).",
            )


def restore_hooks(
    saved: Saved, updates: Mapping[str, Update], names: list[str], device: torch.device
) -> None:
    """Load each rank's state into its hooks; collective.

    Args:
        saved: the result of `gather_hooks`, on rank 0.
        updates: of the trainer.
        names: of the models whose hooks have a state in the checkpoint, on every rank.
        device: of the model.
    """
    for name in names:
        state = updates[name].hook_state
        if state is not None:
            scatter_hook_state(state, saved[name]["states"] if saved else None, device)
