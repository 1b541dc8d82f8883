"""Recompute: activations inside of blocks are not kept for backward, but computed again there.

Costs one more forward of the blocks (about a third of a step's arithmetic) and saves all activations but the
blocks' inputs (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The selective form keeps
the results of matrix products and attention, which are the dear ones to compute, and drops the cheap rest
(Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.errors import PacelineError

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_recompute(model: nn.Module, blocks: list[tuple[str, nn.Module]], kind: str) -> None:
    """Has the blocks of a model computed again in backward; names of parameters stay.

    Args:
        model: for the message.
        blocks: what is recomputed, each by itself.
        kind: "block" or "selective".

    Raises:
        PacelineError: PL465 for a model without blocks.
    """
    if [name for name, _ in blocks] == [""]:
        raise PacelineError(
            "PL465",
            saw=f"recompute={kind} for {type(model).__name__}, in which no repeated blocks were found.",
            rule="What is computed again is a block: one of several modules of a kind in a list.",
            fix="Leave recompute out, or put the repeated part of the model into an nn.ModuleList.",
        )
    for _, block in blocks:
        if kind == "selective":
            checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, _decide))
        else:
            checkpoint(block)


def _decide(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
