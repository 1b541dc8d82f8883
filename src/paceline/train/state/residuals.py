"""The residuals of the compression in checkpoints: whole, by parameter and slot, on any number of ranks.

At a save rank 0 gathers all rows: it then holds (slots + 1) times the model. When a run starts, each rank
reads or receives what it needs: its slots and the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.part import Part
from paceline.comm.residuals import SUM
from paceline.comm.slots import list_own_slots
from paceline.train.update import Update

# Per model: the number of slots, and by slot (or "sum") and parameter the whole residual.
Saved = dict[str, dict[str, Any]]
_NAMES = {SUM: "sum"}
_NUMBERS = {"sum": SUM}
_ROOT = "residuals"


def gather_residuals(updates: Mapping[str, Update]) -> Saved:
    """Gather every rank's residuals on rank 0 for a checkpoint, by model; collective."""
    found: Saved = {}
    for name, update in updates.items():
        if update.compression is not None:
            shapes = {n: p.shape for n, p in update.model.named_parameters()}
            whole = update.compression.residuals.gather(shapes)
            named = {_NAMES.get(slot, str(slot)): by_name for slot, by_name in whole.items()}
            found[name] = {"slots": update.compression.settings.slots, _ROOT: named}
    return found


def choose_residuals(saved: Saved, updates: Mapping[str, Update]) -> Saved:
    """Return what a start uses of saved residuals, read or not.

    Those of another number of slots are left out, because the user has accepted that number.
    """
    chosen: Saved = {}
    for name, update in updates.items():
        record = saved.get(name, {})
        if update.compression is None or record.get("slots") != update.compression.settings.slots:
            continue
        chosen[name] = {_ROOT: record[_ROOT]}
    return chosen


class NeededResiduals:
    """The residuals that this rank needs of a checkpoint: its slots, and the sum.

    Args:
        rank, num_ranks: this one's number, and theirs.
    """

    def __init__(self, updates: Mapping[str, Update], rank: int, num_ranks: int) -> None:
        self._updates = updates
        self._slots: dict[str, range] = {
            name: list_own_slots(update.compression.settings.slots, num_ranks, rank)
            for name, update in updates.items()
            if update.compression is not None
        }

    def needs(self, names: Sequence[Any]) -> bool:
        """Return whether this rank needs a tensor; what is no residual is needed.

        Args:
            names: that lead to the tensor in the tree of a checkpoint.
        """
        if len(names) != 5 or names[0] != _ROOT:
            return True
        return names[3] in _NUMBERS or int(names[3]) in self._slots[names[1]]

    def find_part(self, names: Sequence[Any], shape: tuple[int, ...]) -> Part | None:
        """Return an empty part of a tensor that this rank does not need, else `None`."""
        return None if self.needs(names) or not shape else Part.of_rows(shape, ())

    def load(self, saved: Saved, device: torch.device) -> None:
        """Load residuals into the compression of each model.

        Args:
            saved: the result of `choose_residuals`, with the tensors of this rank read.
        """
        for name, slots in self._slots.items():
            compression = self._updates[name].compression
            assert compression is not None
            whole: dict[str, dict[str, Tensor]] = saved.get(name, {}).get(_ROOT, {})
            numbered = {_NUMBERS.get(key, key): by_name for key, by_name in whole.items()}
            compression.residuals.load(
                {
                    (int(slot), each): tensor.to(device)
                    for slot, by_name in numbered.items()
                    if int(slot) < 0 or int(slot) in slots
                    for each, tensor in by_name.items()
                }
            )
