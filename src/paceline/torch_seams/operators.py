"""Calls functions of torch that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalVariant

from paceline.torch_seams.installed import require

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


def attend_to_end(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """Return causal attention of queries that have the last positions of the keys, without a mask in memory.

    Returns:
        `None` if the device has no kernel for it.
    """
    if torch.is_autocast_enabled(query.device.type):  # it knows attention's public name alone
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    params = SDPAParams(query, key, value, None, 0.0, False, enable_gqa)
    if query.shape[-1] % 8 == 0 and can_use_flash_attention(params):
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
        return found[0]  # type: ignore[no-any-return]
    if not can_use_efficient_attention(params):
        return None
    given = [each.transpose(1, 2) for each in (query, key, value)]
    kind = int(CausalVariant.LOWER_RIGHT)
    found = torch.ops.aten._efficient_attention_forward(*given, *[None] * 5, 0.0, kind, True, scale=scale)
    return found[0].transpose(1, 2)  # type: ignore[no-any-return]


@cache
def flash_shares_heads() -> bool:
    """Return whether torch's flash kernel on CPU takes fewer heads of keys than of queries."""
    query, key = (torch.zeros(1, heads, 8, 8, device="cpu") for heads in (2, 1))
    chosen = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)
