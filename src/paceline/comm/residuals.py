"""Keeps what compression has not sent: the residual of each slot, and that of the sum, by parameter.

A residual is added to the next gradient before that is encoded, so that nothing is lost permanently (error
feedback: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847; for the sum as well: Tang et al. 2019,
https://arxiv.org/abs/1905.05957).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# In place of a slot's number: the residual of the sum over all slots.
SUM = -1


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a parameter; a row is all numbers with the same first index.

    Attributes:
        start, stop: the rows.
        length: numbers in a row.
    """

    name: str
    start: int
    stop: int
    length: int

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @staticmethod
    def all_of(name: str, shape: torch.Size) -> RowRange:
        """Return a whole parameter."""
        num_rows = shape[0] if len(shape) else 1
        return RowRange(name, 0, num_rows, shape.numel() // num_rows if num_rows else 1)


class Residuals:
    """The residuals that one rank keeps: all of its own slots', and its part of the sum's.

    What `put` gets is pending until `settle`, because a step may turn out to be skipped.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, RowRange], Tensor] = {}
        self._pending: dict[tuple[int, RowRange], Tensor] = {}
        # As loaded from a checkpoint, by slot and name: whole parameters.
        self._loaded: dict[tuple[int, str], Tensor] = {}
        # Parameters whose residuals this step replaces, on this rank or another one.
        self._replaced: set[str] = set()

    def replace(self, names: Collection[str]) -> None:
        """Note that this step replaces all residuals of some parameters, also where this rank has no rows."""
        self._replaced |= set(names)

    def take(self, slot: int, piece: RowRange) -> Tensor | None:
        """Return the residual of some rows [num_rows, length]; `None` if there is none yet."""
        if (kept := self._kept.get((slot, piece))) is not None:
            return kept
        # The rows of a rank are the same in every step. Otherwise a residual would be lost here.
        known = any(key[0] == slot and key[1].name == piece.name for key in self._kept)
        whole = self._loaded.get((slot, piece.name))
        assert not known or whole is not None, f"no residual of {piece} in slot {slot}"
        return None if whole is None else whole.view(-1, piece.length)[piece.start : piece.stop]

    def put(self, slot: int, piece: RowRange, residual: Tensor) -> None:
        """Note the residual of this step."""
        self._pending[slot, piece] = residual

    def settle(self, *, keep: bool) -> None:
        """End a step: keep its residuals, or those of the step before if this one is skipped."""
        if keep:
            self._kept |= self._pending
            self._loaded = {key: each for key, each in self._loaded.items() if key[1] not in self._replaced}
        self._pending, self._replaced = {}, set()

    def list_kept(self) -> Iterator[tuple[int, RowRange, Tensor]]:
        """Yield (slot or `SUM`, rows, residual) for everything that this rank keeps."""
        for (slot, piece), residual in self._kept.items():
            yield slot, piece, residual
        for (slot, name), whole in self._loaded.items():
            piece = RowRange.all_of(name, whole.shape)
            yield slot, piece, whole.view(piece.num_rows, piece.length)

    def gather(self, shapes: Mapping[str, Sequence[int]]) -> dict[int, dict[str, Tensor]]:
        """Return on rank 0 the residuals of all ranks, by slot (or `SUM`) and name; collective.

        Args:
            shapes: of the whole parameters.
        """
        own = [(slot, piece, rows.cpu()) for slot, piece, rows in self.list_kept()]
        gathered: list[Any] | None = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(own, gathered, dst=0)
        found: dict[int, dict[str, Tensor]] = {}
        for slot, piece, rows in (each for rank_own in gathered or [] for each in rank_own):
            by_name = found.setdefault(slot, {})
            if piece.name not in by_name:
                by_name[piece.name] = torch.zeros(shapes[piece.name])
            by_name[piece.name].view(-1, piece.length)[piece.start : piece.stop] = rows
        return found

    def load(self, whole: Mapping[tuple[int, str], Tensor]) -> None:
        """Replace everything by whole residuals, by slot and name; used in part where a rank needs less."""
        self._kept, self._pending, self._loaded = {}, {}, dict(whole)
        self._replaced = set()
