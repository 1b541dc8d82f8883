"""The residuals of the compression in checkpoints: whole, by parameter and slot, on any number of ranks.

Rank 0 gathers those of all ranks, as it does the state of communication hooks: at the time of a save it holds
(slots + 1) times the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.residuals import BASIS, SUM
from paceline.comm.slot_ranks import list_own_slots
from paceline.parallel.compress import Compression
from paceline.train.update import Update

# Per model: the number of slots, the rank of thin matrices, and by slot (or "sum", "basis") and parameter the
# whole residual.
Saved = dict[str, dict[str, Any]]
_NAMES = {SUM: "sum", BASIS: "basis"}
_NUMBERS = {name: number for number, name in _NAMES.items()}


def gather_residuals(updates: Mapping[str, Update]) -> Saved:
    """Gather every rank's residuals on rank 0 for a checkpoint, by model; collective."""
    found: Saved = {}
    for name, update in updates.items():
        if update.compression is not None:
            shapes = {n: p.shape for n, p in update.model.named_parameters()}
            whole = _gather(update.compression, shapes)
            settings = update.compression.settings
            found[name] = {"slots": settings.slots, "rank": settings.rank, "residuals": whole}
    return found


def _gather(compression: Compression, shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, Tensor]]:
    own = [(slot, piece, rows.cpu()) for slot, piece, rows in compression.residuals.list_kept()]
    gathered: list[Any] | None = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered, dst=0)
    whole: dict[str, dict[str, Tensor]] = {}
    for rank_own in gathered or []:
        for slot, piece, rows in rank_own:
            by_name = whole.setdefault(_NAMES.get(slot, str(slot)), {})
            if piece.name not in by_name:
                shape = rows.shape if slot == BASIS else shapes[piece.name]
                by_name[piece.name] = torch.zeros(shape)
            by_name[piece.name].view(-1, piece.length)[piece.start : piece.stop] = rows
    return whole


def restore_residuals(saved: Saved, updates: Mapping[str, Update], device: torch.device) -> None:
    """Load the residuals that each rank needs; collective.

    Residuals of another number of slots, and bases of another rank, are dropped, because the user has
    accepted that number.

    Args:
        saved: the result of `gather_residuals`, on rank 0.
        updates: of the trainer.
        device: of the model.
    """
    for name, update in updates.items():
        compression = update.compression
        if compression is None:
            continue
        record = saved.get(name, {})
        fits = record.get("slots") == compression.settings.slots
        whole: dict[str, dict[str, Tensor]] = record["residuals"] if fits else {}
        if record.get("rank") != compression.settings.rank:
            whole = {key: each for key, each in whole.items() if key != _NAMES[BASIS]}
        own = whole
        if dist.is_initialized() and dist.get_world_size() > 1:
            num_slots, num_ranks = compression.settings.slots, dist.get_world_size()
            scattered: list[Any] | None = None
            if dist.get_rank() == 0:
                scattered = [
                    {
                        key: each
                        for key, each in whole.items()
                        if key in _NUMBERS or int(key) in list_own_slots(num_slots, num_ranks, rank)
                    }
                    for rank in range(num_ranks)
                ]
            received: list[Any] = [None]
            dist.scatter_object_list(received, scattered, src=0)
            own = received[0]
        compression.residuals.load(
            {
                (_NUMBERS[key] if key in _NUMBERS else int(key), each): tensor.to(device)
                for key, by_name in own.items()
                for each, tensor in by_name.items()
            }
        )
