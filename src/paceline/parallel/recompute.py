"""Recompute: does not keep activations inside blocks for backward, but computes them again there.

Costs one more forward of the blocks (about a third of a step's arithmetic) and saves all activations except
the blocks' inputs (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The selective form
keeps the results of matrix products, convolutions and attention, which are expensive to compute, and drops
the others (Korthikanti et al. 2022, section 5).

A layer with running statistics (BatchNorm) must count each microbatch once, so the second forward's changes
to its buffers are undone.

The second forward must compute the same as the first. Two things prevent that:

- A cache of keys and values (`use_cache` of Hugging Face's models) is filled once more. It is switched off.
- The selective form keeps results themselves, not copies. A kept result that is changed in place afterwards
  would be changed once more. That is refused, except for changes that make no difference the second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.errors import PacelineError
from paceline.phrases import first_line
from paceline.torch_seams.attention_ops import ATTENTION_OPS
from paceline.torch_seams.dispatch import read_schema
from paceline.torch_seams.modules import NormBase
from paceline.torch_seams.recomputing import Contexts, checkpoint, is_repeating

log = logging.getLogger(__name__)

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    *[getattr(torch.ops.aten, name).default for name in ATTENTION_OPS],
}
# Changes in place whose repetition changes nothing.
_IDEMPOTENT = ("masked_fill_", "relu_", "clamp_", "clamp_min_", "clamp_max_", "hardtanh_", "fill_", "zero_")
# Parts of torch's messages in backward.
_CHANGED = "has been mutated"
_DIFFERS = "encountered during backward but not found in storage"


def apply_recompute(model: nn.Module, blocks: list[tuple[str, nn.Module]], kind: str) -> None:
    """Recompute the blocks of a model in backward; names of parameters do not change.

    Args:
        blocks: the blocks, each recomputed separately.
        kind: "block" or "selective".
    """
    assert [name for name, _ in blocks] != [""], "a rule refuses a model without blocks (PL143)"
    disable_caches(model, "recompute", "backward would fill the cache again")
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

    def __call__(self) -> Contexts:
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        # The first repetition has used what was kept.
        if self._kind == "selective" and not is_repeating():
            first, second = create_selective_checkpoint_contexts(_decide)  # type: ignore[no-untyped-call]
            first.__class__ = _guarded(type(first))
        return first, _statistics_kept(self._layers, second)


@lru_cache(maxsize=1)
def _guarded(mode: type[Any]) -> type[Any]:
    """Return a subclass of torch's mode that refuses changes of what it keeps.

    A mode of its own would make the first forward slower.
    """

    class Guarded(mode):  # type: ignore[misc]
        _kept: set[StorageWeakRef]

        def __enter__(self) -> Any:
            self._kept = set()
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._kept and read_schema(func).is_mutable:
                self._check(func, args)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func in _KEPT:
                tensors = out if isinstance(out, tuple) else (out,)
                self._kept.update(_storage(x) for x in tensors if isinstance(x, Tensor))
            return out

        def _check(self, func: Any, args: Any) -> None:
            schema = read_schema(func)
            if schema.name.rpartition("::")[2] in _IDEMPOTENT:
                return
            for argument, value in zip(schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and _storage(value) in self._kept:
                    raise _changed_error(f"{schema.name.rpartition('::')[2]} changes a tensor in place.")

    return Guarded


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _changed_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL438",
        saw=saw,
        rule="recompute=selective keeps the results of matrix products, convolutions and attention. Backward "
        "would change a kept result once more.",
        fix="Write the operation without the trailing underscore (x = x + y for x += y, inplace=False), or "
        "use recompute=block.",
    )


@contextmanager
def explaining_recompute() -> Iterator[None]:
    """Explain torch's errors about repeated forwards inside the context, in which backward runs."""
    try:
        yield
    except RuntimeError as error:
        if _CHANGED in str(error):
            raise _changed_error(first_line(error)) from error
        if not isinstance(error, CheckpointError) and _DIFFERS not in str(error):
            raise
        raise PacelineError(
            "PL439",
            saw=f"a block ran differently when backward recomputed it: {first_line(error)}",
            rule="The second forward of a block must compute the same as the first.",
            fix="Check the block's forward for state that it changes (a cache of keys and values, a "
            "counter, a list) or draws of another generator. For a model of transformers pass "
            "use_cache=False in forward=. Or leave recompute out.",
        ) from error


def disable_caches(model: nn.Module, setting: str, why: str) -> None:
    """Switch off the caches of keys and values, which blocks fill in every forward, and log why.

    Args:
        model: of transformers, or any other.
        setting: that cannot be combined with them.
        why: after "because".
    """
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    cached = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in cached:
        config.use_cache = False
    if cached:
        log.info("%s: use_cache of %s is set to False, because %s", setting, type(model).__name__, why)


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
