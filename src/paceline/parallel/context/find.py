"""Finds the plan of cp for a model, from one trial forward."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from paceline.errors import PacelineError
from paceline.parallel.context.context_plan import ContextPlan
from paceline.parallel.context.refusals import kernel_error
from paceline.parallel.context.rehearsal import Rehearsal
from paceline.parallel.context.walk import Walk
from paceline.parallel.context.walk_gather import GatherWalk
from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.tensor.rules import read_dims
from paceline.parallel.tensor.trace import trace_forward

log = logging.getLogger(__name__)

# Parts of the names of attention kernels in transformers that are not functions of torch.
_KERNELS = ("flash", "flex")


def find_context_plan(
    model: nn.Module,
    example: Callable[[nn.Module], Any],
    num_ranks: int,
    masks: Masks | None = None,
    *,
    tp: int = 1,
    by: str = "heads",
    mixtures: Sequence[str] = (),
) -> ContextPlan:
    """Find out how a model can run on a part of the sequence, without changing it.

    Args:
        model: in training mode, whole; may be on meta.
        example: calls the model on a batch of a few samples.
        num_ranks: degree of cp.
        masks: the model's dropout, so that the plan knows which dropouts see parts.
        tp: degree of tp, which divides the heads too.
        by: how ranks attend, `"heads"`, `"gather"`, or `"auto"`: by heads if cp divides them, else by gather.
        mixtures: full names of modules that need the whole sequence.
    """
    _check_kernels(model)
    if by == "auto":
        find = partial(find_context_plan, model, example, num_ranks, masks, tp=tp, mixtures=mixtures)
        try:
            return find(by="heads")
        except PacelineError as error:
            if error.code != "PL630":
                raise
            try:
                plan = find(by="gather")
            except PacelineError as other:
                if other.code not in ("PL630", "PL634"):
                    raise
                raise error from other  # whose advice would be heads
            log.info("cp: by gather, because by heads %s", error.saw)
            return plan
    if masks is not None:
        masks.shows_attention = by != "heads"
    try:
        trace = trace_forward(model, example, masks=masks)
    except PacelineError as error:
        kernel = _find_kernel(error)
        if kernel is None:
            raise
        raise kernel_error(f"{error.saw.partition(': ')[0]}, which calls {kernel}") from error
    kind = Walk if by == "heads" else GatherWalk
    walk = kind(model, num_ranks, trace, read_dims(trace), tp, by, mixtures)
    walk.walk()
    Rehearsal(walk).rehearse(example, masks)
    return walk.plan


def _check_kernels(model: nn.Module) -> None:
    """Raise PL640 for attention in a kernel that a trial forward cannot run on tensors without memory."""
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kernel, str) and any(word in kernel for word in _KERNELS):
            raise kernel_error(f'{name or type(model).__name__} has attn_implementation="{kernel}"')


def _find_kernel(error: PacelineError) -> str | None:
    """Return the kernel that ended a trial forward, if torch only compiles it (flex attention)."""
    found = re.search(r"HigherOrderOperator (\w+)", str(error.__cause__))
    return found[1] if found and isinstance(error.__cause__, NotImplementedError) else None
