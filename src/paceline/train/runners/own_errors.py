"""Errors of backwards that the user's own code runs in a `Loop`."""

from __future__ import annotations

import torch.distributed as dist

from paceline.errors import PacelineError


def summed_already_error() -> PacelineError:
    """Return PL644, for a backward after the one in which ranks have summed the gradients."""
    return PacelineError(
        "PL644",
        saw="another backward in a microbatch after step.backward(loss).",
        rule="step.backward sums the gradients over ranks while it computes them, so it comes last.",
        fix="Add the losses and call step.backward once, pass retain_graph=True to all but the last "
        "step.backward, or use loss.backward() for all of them.",
    )


def mixed_error() -> PacelineError:
    """Return PL644, for a `step.backward` after a plain backward of the same microbatch."""
    return PacelineError(
        "PL644",
        saw="step.backward(loss) after loss.backward() in the same microbatch.",
        rule="The gradients of a plain backward are weighted after the microbatch, those of step.backward "
        "before it, so both in one microbatch would be weighted differently.",
        fix="Use one of the two for all backwards of a microbatch.",
    )


def one_backward_error(what: str) -> PacelineError:
    """Return PL644, for a microbatch without exactly one backward under dp_shard, and what this rank did."""
    return PacelineError(
        "PL644",
        saw=f"rank {dist.get_rank()} {what}",
        rule="Under dp_shard all ranks gather and sum each block together, once forward and once backward "
        "per microbatch.",
        fix="Add the losses and call backward once. To leave a microbatch out, multiply its loss by zero, or "
        "give it the weight 0.",
    )


def plain_under_experts_error() -> PacelineError:
    """Return PL645, for a plain backward where ranks share experts."""
    return PacelineError(
        "PL645",
        saw="loss.backward() under layout.ep.",
        rule="A rank computes gradients of its experts for the microbatches of other ranks, so their weights "
        "must be part of the backward.",
        fix="Call step.backward(loss).",
    )
