"""The errors of context parallelism that several files raise."""

from __future__ import annotations

from paceline.errors import PacelineError

_FIX = "Set cp=1 and give its ranks to dp_shard, dp_replicate or tp."


def cannot_divide_error(reason: str, fix: str = _FIX) -> PacelineError:
    """Return the error for a model whose sequences cannot be divided, with the place that prevents it."""
    return PacelineError(
        "PL630",
        saw=f"layout.cp: {reason}.",
        rule="Between the first and the last block, each rank of cp has a part of every sequence. So blocks "
        "pass on one tensor [batch, length, width] and, outside of attention, treat every position "
        "independently.",
        fix=fix,
    )
