"""The errors of context parallelism that several files raise."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.own_code import describe_place
from paceline.parallel.tensor.trace import TracedOp

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


def refused_op_error(op: TracedOp, reason: str) -> PacelineError:
    """Return the error for an operation that cannot run on a part of the sequence, with its line.

    Args:
        op: it.
        reason: continues a sentence that begins with the operation.
    """
    where, line = f"in {op.module or 'the model'}", name_line(op)
    if op.library != "aten":
        return kernel_error(f"{op.library}::{op.name} {where}{line} is a kernel of another library")
    return cannot_divide_error(f"{op.name} {where} {reason}{line}")


def name_line(op: TracedOp) -> str:
    """Return the line that calls an operation, in brackets, as the end of a sentence."""
    return "" if op.line is None else f" ({describe_place(*op.line)})"


def kernel_error(saw: str) -> PacelineError:
    """Return the error for an attention kernel; Paceline does not know what it combines."""
    return PacelineError(
        "PL640",
        saw=f"layout.cp: {saw}.",
        rule="To find where cp can divide sequences, one forward is traced on tensors without memory. "
        "That follows operations of torch.",
        fix="Make the model call F.scaled_dot_product_attention, which takes any mask and runs torch's own "
        'flash kernel where it can (for models of transformers: attn_implementation="sdpa").',
    )


def too_short_error(length: int, num_ranks: int) -> PacelineError:
    """Return the error for a sequence with fewer positions than ranks of cp."""
    return PacelineError(
        "PL631",
        saw=f"a sequence of {length} positions on cp={num_ranks}.",
        rule="Every rank of cp has at least one position of each sequence.",
        fix=f"Set cp to at most {max(1, length)}, or train on longer sequences.",
    )
