"""Calls functions of torch that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from paceline.torch_seams.check import require

require("operators")

# The unpatched F.scaled_dot_product_attention.
ATTENTION: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
# The module in which torch's own functionals look up `dropout` and similar functions.
FUNCTIONS: ModuleType = torch._VF


def find_function(name: str) -> Callable[..., Tensor]:
    """Return the unpatched function of this name in `torch`."""
    found: Callable[..., Tensor] = getattr(torch._C._VariableFunctions, name)
    return found


def measure_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor, in one kernel if possible."""
    return torch._foreach_norm(tensors)


def add_to_each(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add to each tensor the other list's tensor at the same index, in one kernel if possible."""
    if tensors:
        torch._foreach_add_(tensors, others)


def multiply_each(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor by one number, in one kernel if possible."""
    if tensors:  # a stage may have none that is trained
        torch._foreach_mul_(tensors, factor)


def apply_safe_softmax(scores: Tensor) -> Tensor:
    """Return the softmax along the last dimension; a row of -inf gives zeros."""
    weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return weights


def reduces_narrow_attention() -> bool:
    """Return whether torch's attention without fused kernels may reduce in fp16 and bf16."""
    return torch._C._get_math_sdp_allow_fp16_bf16_reduction()


@cache
def flash_shares_heads() -> bool:
    """Return whether torch's flash kernel on CPU takes fewer heads of keys than of queries."""
    query, key = (torch.zeros(1, heads, 8, 8, device="cpu") for heads in (2, 1))
    chosen = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


def attend_with_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [batch, heads, queries, width] on CPU, and its logarithms of sums of exponentials.

    Args:
        query, key, value: [batch, heads, length, width], of one width.
        mask: added to the scores, four dimensions; `None` for none.
        is_causal, scale: as for `scaled_dot_product_attention`.
    """
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, sums


def propagate_with_sums(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of `attend_with_sums`.

    Args:
        grad: of the result.
        query, key, value, mask, is_causal, scale: as given there.
        out, sums: as returned there, or for more keys than these.
    """
    found: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    )
    return found
