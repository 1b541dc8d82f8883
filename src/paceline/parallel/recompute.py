"""Recompute: does not keep activations inside blocks for backward, but computes them again there.

Costs one more forward of the blocks (about a third of a step's arithmetic) and saves all activations except
the blocks' inputs (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The selective form
keeps the results of matrix products, convolutions and attention, which are expensive to compute, and drops
the others (Korthikanti et al. 2022, section 5).

A layer with running statistics (BatchNorm) must count each microbatch once, so the second forward's changes
to its buffers are undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.errors import PacelineError
from paceline.parallel.attention_ops import ATTENTION_OPS
from paceline.torch_seams.modules import NormBase
from paceline.torch_seams.recomputing import checkpoint

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    *[getattr(torch.ops.aten, name).default for name in ATTENTION_OPS],
}


def apply_recompute(model: nn.Module, blocks: list[tuple[str, nn.Module]], kind: str) -> None:
    """Recompute the blocks of a model in backward; names of parameters do not change.

    Args:
        model: for the message.
        blocks: the blocks, each recomputed separately.
        kind: "block" or "selective".

    Raises:
        PacelineError: PL465 for a model without blocks.
    """
    if [name for name, _ in blocks] == [""]:
        raise PacelineError(
            "PL465",
            saw=f"recompute={kind} for {type(model).__name__}, in which no repeated blocks were found.",
            rule="A block is recomputed as a whole; blocks are modules of one kind in a list.",
            fix="Leave recompute out, or put the repeated part of the model into an nn.ModuleList.",
        )
    for _, block in blocks:
        layers = [layer for layer in block.modules() if isinstance(layer, NormBase)]
        if kind == "selective" or layers:
            checkpoint(block, context_fn=_Contexts(kind, layers))
        else:
            checkpoint(block)


class _Contexts:
    """A factory of the contexts around a block's first and second forward.

    Args:
        kind: "block" or "selective".
        layers: those of the block that may have running statistics.
    """

    def __init__(self, kind: str, layers: list[NormBase]) -> None:
        self._kind = kind
        self._layers = layers

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        if self._kind == "selective":
            first, second = create_selective_checkpoint_contexts(_decide)  # type: ignore[no-untyped-call]
        return first, _statistics_kept(self._layers, second)


@contextmanager
def _statistics_kept(layers: list[NormBase], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Restore running statistics after a second forward."""
    buffers = [
        buffer
        for layer in layers
        if layer.training
        for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if isinstance(buffer, Tensor)
    ]
    saved = [buffer.clone() for buffer in buffers]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)


def _decide(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
