"""A form of `nn.MultiheadAttention` whose heads can be divided.

torch's own forward derives the width of a head from that of the input, so it cannot run on some of the heads
only. Its packed projection for attention between two sequences is cut in unequal runs. This form computes the
same from the projections' own sizes. The fast path of torch's transformer layers bypasses a module's forward,
so it is turned off for models that are laid out over tp.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.tensor.flow import runs_own_forward


def open_attention(model: nn.Module) -> None:
    """Replace the forwards of all `nn.MultiheadAttention`s of a model; the parameters do not change.

    A subclass or an instance with a patched forward may compute something else, and is left alone.
    """
    found = [
        module
        for module in model.modules()
        if type(module) is nn.MultiheadAttention and runs_own_forward(module, nn.MultiheadAttention)
    ]
    for module in found:
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    if found:
        torch.backends.mha.set_fastpath_enabled(False)


def _forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    batched = query.dim() == 3
    same = query is key is value
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    elif not self.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    queries, keys, values = _project(self, query, key, value, same=same)
    num_samples = query.shape[0]
    if self.bias_k is not None and self.bias_v is not None:
        keys = torch.cat([keys, self.bias_k.expand(num_samples, 1, -1)], dim=1)
        values = torch.cat([values, self.bias_v.expand(num_samples, 1, -1)], dim=1)
    if self.add_zero_attn:
        keys, values = (torch.cat([x, torch.zeros_like(x[:, :1])], dim=1) for x in (keys, values))
    num_added = (self.bias_k is not None) + self.add_zero_attn

    def heads(x: Tensor) -> Tensor:  # [samples, heads, length, width]
        split: Tensor = x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        return split.transpose(1, 2)

    mask = _merge_masks(attn_mask, key_padding_mask, queries.dtype, num_samples, num_added, batched)
    dropout = self.dropout if self.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = heads(queries) @ heads(keys).transpose(-2, -1) / self.head_dim**0.5
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        # In torch's own form, [samples * heads, targets, sources]: masks follow from the shape.
        dropped = F.dropout(weights.flatten(0, 1), dropout, self.training)
        weights = dropped.unflatten(0, (num_samples, -1))  # type: ignore[no-untyped-call]
        attended = weights @ heads(values)
    else:
        only_causal = is_causal and attn_mask is not None and key_padding_mask is None
        attended = F.scaled_dot_product_attention(
            heads(queries),
            heads(keys),
            heads(values),
            None if only_causal else mask,
            dropout_p=dropout,
            is_causal=only_causal,
        )
    output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
    if not batched:
        output = output.squeeze(0)
    elif not self.batch_first:
        output = output.transpose(0, 1)
    if weights is not None:
        weights = weights.mean(dim=1) if average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    return output, weights


def _project(
    self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, same: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bias = self.in_proj_bias
    packed: Tensor | None = self.in_proj_weight
    if packed is not None and same:
        queries, keys, values = F.linear(query, packed, bias).chunk(3, dim=-1)
        return queries, keys, values
    separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    queries, keys, values = (
        F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    return queries, keys, values


def _merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dtype: torch.dtype,
    num_samples: int,
    num_added: int,
    batched: bool,
) -> Tensor | None:
    """Return both masks as one addend of the scores [samples, heads, targets, sources], or `None`.

    The masks depend on the number of sources; a rank may have only some of them. `num_added` more come
    behind.
    """
    total: Tensor | None = None
    if attn_mask is not None:
        total = _as_addend(attn_mask, dtype)
        if total.dim() == 3:  # [samples * heads, targets, sources]
            total = total.unflatten(0, (num_samples, -1))  # type: ignore[no-untyped-call]
        total = F.pad(total, (0, num_added)) if num_added else total  # bias_k and add_zero_attn
    if key_padding_mask is not None:
        padding = _as_addend(key_padding_mask, dtype)
        padding = padding if batched else padding.unsqueeze(0)
        padding = F.pad(padding, (0, num_added)) if num_added else padding
        padding = padding[:, None, None, :]
        total = padding if total is None else total + padding
    return total


def _as_addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask.to(dtype)
