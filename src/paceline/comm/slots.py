"""Sums the compressed gradients of all slots, with the same bits on any number of ranks.

A slot is a block of consecutive microbatches whose gradients are added first, and then compressed together.
The number of slots belongs to the run, the number of ranks does not: each rank has an equal number of
consecutive slots.

Protocol for some rows of parameters on W ranks, which hold k slots each:

1. Every rank encodes these rows of its slots, each with the slot's residual added, and keeps what the
   encoding lost as the new residual.
2. The rows are divided into W parts. Every rank sends rank r the bytes of part r of each of its slots.
3. Rank r decodes part r of all slots and adds them in the order of the tree over slots. It encodes the sum,
   again with a residual.
4. Every rank sends its part of the encoded sum to all others.
5. Every rank decodes the sum.

Sent per rank: (k + 1)(W - 1)/W times the encoded bytes.

A row is encoded by itself (`comm/codec.py`) and the order of additions is that of the tree over slots, so the
division over ranks changes no bit. The sum is encoded and decoded under every layout, also where it is not
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.codec import Codec, choose_codec
from paceline.comm.residuals import SUM, Residuals, RowRange
from paceline.comm.tree import plan_reduction
from paceline.comm.tree_exchange import pass_on

# Numbers encoded at once, so that what the steps of encoding pass on stays in the core's own cache.
_SLAB = 1 << 15


@dataclass(frozen=True)
class _RankRows:
    """The rows that one rank adds.

    Attributes:
        start, stop: its bytes within an encoded slot.
        pieces: its rows, in the order of the bytes.
    """

    start: int
    stop: int
    pieces: tuple[RowRange, ...]


def list_own_slots(num_slots: int, num_ranks: int, rank: int) -> range:
    """Return the numbers of the slots that a rank has."""
    per_rank = num_slots // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


class SlotSum:
    """A sum over the slots of all ranks.

    Args:
        codec: of the rows that are long enough.
        num_slots: over all ranks; a multiple of these.
        group: the ranks, used for nothing else at the same time; `None` in a world of one.

    Attributes:
        sent_bytes: what this rank has sent to others so far.
        own: the numbers of this rank's slots.
    """

    def __init__(
        self,
        codec: Codec,
        num_slots: int,
        residuals: Residuals,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.sent_bytes = 0
        self._codec = codec
        self._residuals = residuals
        self._group = group
        self._num_ranks = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._num_slots = num_slots
        self.own = list_own_slots(num_slots, self._num_ranks, self._rank)
        self._additions = plan_reduction((1,) * num_slots).additions
        # Kept from sum to sum: fresh memory costs a page fault for every 4 KiB.
        self._memory: dict[str, Tensor] = {}

    def sum(
        self,
        pieces: Sequence[RowRange],
        slots: Sequence[Sequence[Tensor | None]],
        totals: Sequence[Tensor],
        factor: float,
    ) -> None:
        """Sum the slots of all ranks; collective.

        Args:
            pieces: the rows to sum, one piece per parameter; the same on every rank.
            slots: per own slot, the gradient of each piece [num_rows, length]; `None` for zeros.
            totals: per piece, [num_rows, length]; receives the sum.
            factor: by which gradients are multiplied before residuals are added to them; a power of two. The
                sum is divided by it.
        """
        device = totals[0].device if totals else torch.device("cpu")
        self._residuals.replace({piece.name for piece in pieces})
        parts = self._cut(pieces)
        encoded = self._reserve("encoded", len(self.own) * parts[-1].stop, device).view(len(self.own), -1)
        for place, slot in enumerate(self.own):
            gradients = {p.name: (p.start, each) for p, each in zip(pieces, slots[place], strict=True)}
            for part in parts:
                at = part.start
                for piece in part.pieces:
                    first, gradient = gradients[piece.name]
                    rows = None if gradient is None else gradient[piece.start - first : piece.stop - first]
                    at = self._encode(slot, piece, rows, factor, encoded[place], at)
                assert at == part.stop

        own = parts[self._rank]
        collected = self._collect(encoded, parts, own.stop - own.start)
        total = self._reserve("total", parts[-1].stop, device)
        self._add(own, collected, total[own.start : own.stop])
        self._spread(parts, total)
        at = 0
        for piece, target in zip(pieces, totals, strict=True):
            codec, view = self._view(total, piece, at)
            for slab in _slabs(piece):
                torch.mul(codec.decode(view[slab], piece.length), 1.0 / factor, out=target[slab])
            at += view.numel()

    def _encode(
        self, slot: int, piece: RowRange, gradient: Tensor | None, factor: float, target: Tensor, at: int
    ) -> int:
        """Encode rows of a slot at a place of `target`, note the residual, and return the place after."""
        codec, view = self._view(target, piece, at)
        before = self._residuals.take(slot, piece)
        after = torch.empty(piece.num_rows, piece.length, device=target.device)
        for slab in _slabs(piece):
            rows = torch.zeros_like(after[slab]) if gradient is None else gradient[slab] * factor
            # 0.0 turns -0.0 into 0.0, as residuals do: whether a missing gradient is either depends on ranks.
            rows.add_(0.0 if before is None else before[slab])
            codec.encode(rows, view[slab])
            torch.sub(rows, codec.decode(view[slab], piece.length), out=after[slab])
        self._residuals.put(slot, piece, after)
        return at + view.numel()

    def _collect(self, encoded: Tensor, parts: list[_RankRows], own_bytes: int) -> Tensor:
        """Return this rank's part of all slots [num_slots, own_bytes]."""
        own = parts[self._rank]
        if self._group is None:
            return encoded
        num_bytes = self._num_slots * own_bytes
        rows = self._reserve("rows", num_bytes, encoded.device).view(self._num_slots, own_bytes)
        departures, arrivals = [], []
        for slot, arriving in enumerate(rows):
            holder = slot * self._num_ranks // self._num_slots
            if holder != self._rank:
                arrivals.append((holder, arriving))
        for place, slot in enumerate(self.own):
            for peer, part in enumerate(parts):
                if peer == self._rank:
                    rows[slot].copy_(encoded[place, own.start : own.stop])
                else:
                    departures.append((peer, encoded[place, part.start : part.stop]))
        self.sent_bytes += pass_on(self._group, departures, arrivals)
        return rows

    def _add(self, part: _RankRows, rows: Tensor, total: Tensor) -> None:
        """Add a part of all slots, and encode the sum."""
        at = 0
        for piece in part.pieces:
            codec, target = self._view(total, piece, at)
            size = target.numel()
            before = self._residuals.take(SUM, piece)
            after = torch.empty(piece.num_rows, piece.length, device=total.device)
            encoded = rows[:, at : at + size].view(len(rows), *target.shape)
            for slab in _slabs(piece):
                decoded = [codec.decode(each[slab], piece.length) for each in encoded]
                for left, right in self._additions:
                    decoded[left].add_(decoded[right])
                if before is not None:
                    decoded[0].add_(before[slab])
                codec.encode(decoded[0], target[slab])
                torch.sub(decoded[0], codec.decode(target[slab], piece.length), out=after[slab])
            self._residuals.put(SUM, piece, after)
            at += size

    def _spread(self, parts: list[_RankRows], total: Tensor) -> None:
        """Send this rank's part of the encoded sum to the other ranks, and receive theirs."""
        if self._group is None:
            return
        own = parts[self._rank]
        others = [(peer, part) for peer, part in enumerate(parts) if peer != self._rank]
        departures = [(peer, total[own.start : own.stop]) for peer, _ in others]
        arrivals = [(peer, total[part.start : part.stop]) for peer, part in others]
        self.sent_bytes += pass_on(self._group, departures, arrivals)

    def _view(self, encoded: Tensor, piece: RowRange, at: int) -> tuple[Codec, Tensor]:
        """Return the codec of some rows, and their bytes [num_rows, row_bytes] from a place on."""
        codec = choose_codec(self._codec, piece.length)
        row_bytes = codec.count_row_bytes(piece.length)
        return codec, encoded[at : at + piece.num_rows * row_bytes].view(piece.num_rows, row_bytes)

    def _cut(self, pieces: Sequence[RowRange]) -> list[_RankRows]:
        """Return the part of every rank: an equal share of the bytes."""
        sizes = [choose_codec(self._codec, p.length).count_row_bytes(p.length) for p in pieces]
        whole = sum(piece.num_rows * size for piece, size in zip(pieces, sizes, strict=True))
        parts: list[_RankRows] = []
        start = 0
        for rank in range(self._num_ranks):
            # A row belongs to the part that contains its first byte.
            first, last = whole * rank // self._num_ranks, whole * (rank + 1) // self._num_ranks
            found, at, num_bytes = [], 0, 0
            for piece, size in zip(pieces, sizes, strict=True):
                low = min(max(-(-(first - at) // size), 0), piece.num_rows)
                high = min(max(-(-(last - at) // size), 0), piece.num_rows)
                if low < high:
                    rows = (piece.start + low, piece.start + high)
                    found.append(RowRange(piece.name, *rows, piece.length))
                    num_bytes += (high - low) * size
                at += piece.num_rows * size
            parts.append(_RankRows(start, start + num_bytes, tuple(found)))
            start += num_bytes
        return parts

    def _reserve(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < num_bytes:
            memory = self._memory[name] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory[:num_bytes]


def _slabs(piece: RowRange) -> list[slice]:
    """Return the rows in groups of about `_SLAB` numbers."""
    step = max(1, _SLAB // piece.length)
    return [slice(at, min(at + step, piece.num_rows)) for at in range(0, piece.num_rows, step)]
