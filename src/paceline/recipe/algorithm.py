"""The table of a recipe that defines how ranks exchange numbers: [algorithm]."""

from __future__ import annotations

from typing import Literal

from paceline.recipe.section import Section


class AlgorithmSection(Section):
    """The algorithms by which CPU ranks exchange numbers: they change the speed, and no bit of the result.

    `docs/communicate.md` describes them. On CUDA all messages are NCCL's.
    """

    exact_sum: Literal["auto", "shared-memory", "by-node", "direct"] = "auto"
    """Sums of gradients with `train.reduction = "exact"`. `"shared-memory"`: for ranks of one machine.
    `"by-node"`: for several machines of which one has several ranks. `"direct"`: messages between all pairs
    of ranks. `"auto"`: the first of these that suits the ranks, or with `links` the fastest by prediction."""
    agreement: Literal["auto", "board", "direct", "library"] = "auto"
    """The numbers that ranks agree on in each step. `"board"`: in memory that all ranks share. `"direct"`:
    every rank sends its numbers to all others. `"library"`: an all-reduce. `"auto"`: the board if there can
    be one, else `"direct"` up to 256 KiB sent by a rank, or with `links` the fastest by prediction."""
    broadcast: Literal["auto", "pipeline", "library"] = "auto"
    """Rank 0's weights at the start. `"pipeline"`: passed on along a chain of ranks. `"library"`: the
    library's broadcast. `"auto"`: the library's, or with `links` the fastest by prediction."""
    links: str | None = None
    """File of measured links, from `paceline bench collectives --save-links FILE` on the same hosts. `"auto"`
    then takes the algorithm with the smallest predicted time. Default: none, and a fixed rule decides."""
