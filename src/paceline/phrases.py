"""Builds phrases that messages share: names of ranks, a few of many names, the first line of an error."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

_MANY_PIECES = 6
# Shorter runs are listed: "ranks 0 and 1", not "ranks 0-1".
_SHORT_RUN = 3
_MANY_LETTERS = 300


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 2`, `ranks 0, 1 and 3`, `ranks 0-31`, `ranks 0, 8 ... 56 (8 of them)`."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    pieces = _list_runs(ordered)
    step = ordered[1] - ordered[0] if len(ordered) > 1 else 0
    if len(pieces) > _MANY_PIECES:
        if all(b - a == step for a, b in itertools.pairwise(ordered)):
            return f"ranks {ordered[0]}, {ordered[1]} ... {ordered[-1]} ({len(ordered)} of them)"
        shown = pieces[: _MANY_PIECES - 1]
        num_shown = sum(len(piece) for piece in shown)
        return f"ranks {', '.join(map(_name_run, shown))} and {len(ordered) - num_shown} others"
    return f"ranks {join([_name_run(piece) for piece in pieces])}"


def _list_runs(ordered: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [part for run in runs for part in ([run] if len(run) >= _SHORT_RUN else [[rank] for rank in run])]


def _name_run(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def join(pieces: Sequence[str]) -> str:
    """Join words as in `a, b and c`."""
    return pieces[0] if len(pieces) == 1 else f"{', '.join(pieces[:-1])} and {pieces[-1]}"


def name_some(names: Sequence[str], limit: int = 3) -> str:
    """Name the first few, as in `a, b, c and 5 more`; each name once."""
    different = list(dict.fromkeys(names))
    more = len(different) - limit
    return ", ".join(different[:limit]) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MANY_LETTERS].rstrip(".") if lines else type(error).__name__
