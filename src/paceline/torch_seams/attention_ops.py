"""Names of the operations that `scaled_dot_product_attention` dispatches to, one per kernel."""

from __future__ import annotations

# Of torch.ops.aten. Which one runs depends on device, type, shape and mask.
ATTENTION_OPS = (
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
