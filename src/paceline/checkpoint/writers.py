"""Assigns the parts of a sharded checkpoint to writers, equally on every rank without communication.

Each part has one writer among the ranks that hold it. If several ranks hold the same parts, they share the
work so that their bytes differ by at most one tensor: the largest parts first, each to the rank that has the
least so far (Graham's rule).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.part import Part


@dataclass(frozen=True)
class Holding:
    """A part of a tensor, and the ranks that hold it.

    Attributes:
        name: of the tensor in the checkpoint.
        ranks: that hold it, rising.
    """

    name: str
    part: Part
    num_bytes: int
    ranks: tuple[int, ...]


def plan_writers(holdings: Sequence[Holding]) -> list[int]:
    """Return the rank that writes each holding; depends on nothing but the arguments."""
    written: Counter[int] = Counter()
    writers = [holding.ranks[0] for holding in holdings]
    shared = []
    for number, holding in enumerate(holdings):
        if len(holding.ranks) == 1:
            written[holding.ranks[0]] += holding.num_bytes
        else:
            shared.append(number)
    for number in sorted(shared, key=lambda n: (-holdings[n].num_bytes, holdings[n].name, n)):
        writer = min(holdings[number].ranks, key=lambda rank: (written[rank], rank))
        writers[number] = writer
        written[writer] += holdings[number].num_bytes
    return writers


def digest_holdings(holdings: Sequence[Holding]) -> str:
    """Return a digest of everything that the plan depends on, to compare between ranks."""
    return hashlib.sha256(repr(list(holdings)).encode()).hexdigest()
