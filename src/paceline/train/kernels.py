"""Determines which torch optimizer kernels round an element in the same way wherever its tensor is cut.

The fused Adam and AdamW for CPU process whole vector registers. They round the elements that remain at the
end of a tensor differently (seen in torch 2.13, fp32 and fp64). A shard ends elsewhere than the whole tensor,
but always with a whole row.
"""

from __future__ import annotations

from torch import Tensor

# Numbers in the widest register: 16 of fp32 with AVX-512.
REGISTER = 16


def rounds_by_place(parameter: Tensor) -> bool:
    """Return whether fused Adam may give an element other bits if the parameter is cut along its rows."""
    if parameter.device.type != "cpu":
        return False
    row = parameter.shape[1:].numel() if parameter.dim() > 1 else 1
    return row % REGISTER != 0
