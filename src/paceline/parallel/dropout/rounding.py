"""Computes dropout from a mask, rounded as torch does it."""

from __future__ import annotations

import logging
import math
from functools import cache

import torch
from torch import Tensor

from paceline.torch_seams.fake import FakeTensor
from paceline.torch_seams.operators import apply_safe_softmax, reduces_narrow_attention

log = logging.getLogger(__name__)


def apply_mask(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """Return x * keep / (1 - p), in the same steps as torch.

    For backward, the CPU keeps the mask in x's dtype, which is faster. Other devices keep a byte per element.
    """
    if not inplace and p < 1 and x.device.type != "cpu" and not isinstance(x, FakeTensor):
        # torch's backward of dropout is exactly the computation that remains once there is a mask.
        y: Tensor = torch.ops.aten.native_dropout_backward(x, keep, 1 / (1 - p))
        return y
    noise = keep.to(x.dtype)
    if p < 1:
        noise.div_(1 - p)
    return x.mul_(noise) if inplace else x * noise


def apply_alpha_mask(x: Tensor, keep: Tensor, p: float, inplace: bool) -> Tensor:
    """Apply alpha dropout (Klambauer et al. 2017, section 3) with the constants of aten's Dropout.cpp."""
    noise = keep.to(x.dtype)
    if p == 1:
        return x.mul_(noise) if inplace else x * noise
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    b = noise.sub(1).mul_(alpha * a).add_(alpha * a * p)
    noise = noise.mul_(a)
    return x.mul_(noise).add_(b) if inplace else torch.add(x * noise, b)


@cache
def _report_unfused() -> None:
    """Log once what attention with dropout costs where torch has fused kernels."""
    log.warning(
        "attention with dropout runs unfused: masks of fused kernels depend on the number of ranks, so its "
        "weights (heads x queries x keys) are made whole; without dropout it is fused"
    )


def weigh(
    query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Return attention's weights before dropout, in the steps of `_scaled_dot_product_attention_math`.

    (torch's function takes a mask for its dropout, but warns that it is for tests.)
    """
    if query.device.type == "cuda":
        _report_unfused()
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -math.inf)
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if narrow and not reduces_narrow_attention():
        query, key = query.float(), key.float()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(factor))
    key = repeat_heads(key, query, enable_gqa).transpose(-2, -1) * root
    scores = (query * math.copysign(root, factor)) @ key
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        # Not in place: recompute may keep the product, and would mask it once more.
        scores = scores.masked_fill(~kept, -math.inf)
    if bias is not None:
        scores = scores + bias
    return apply_safe_softmax(scores)


def repeat_heads(x: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """Return keys or values [..., heads, length, width], each head repeated for the queries that share it."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) if enable_gqa else x
