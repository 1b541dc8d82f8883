"""Fits the factor with which each microbatch's gradient has entered a sum of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.train.trainer import Trainer
from paceline.verifying.compare import fit_sum
from paceline.verifying.observe import take_part

# Maximum elements used in a least-squares fit.
_MAX_FITTED = 100_000


def fit_microbatches(
    trainer: Trainer, parts: Path, gradients: Mapping[str, Tensor], count: int, scale: float
) -> tuple[list[float] | None, list[float] | None]:
    """Return the factors of the microbatches, and the factors less 1 of the difference from a plain sum.

    The second fit explains only the difference. It finds factors that are nearly 1, which the error of the
    first fit would hide.

    Args:
        trainer: of the layout.
        parts: the file of the reference's gradients, by microbatch and name.
        gradients: this rank's, by name.
        count: of microbatches.
        scale: the factor of a microbatch's raw gradient in the mean over the global batch.

    Returns:
        `None` for factors that explain nothing.
    """
    file: Any = safe_open(str(parts), framework="pt")
    keys = frozenset(file.keys())
    columns: list[list[Tensor]] = [[] for _ in range(count)]
    right: list[Tensor] = []
    for name, gradient in gradients.items():
        # Every `stride`-th element: a small fit, in which parameters have about equal shares.
        stride = max(1, gradient.numel() * len(gradients) // _MAX_FITTED)
        right.append(gradient.double().flatten()[::stride])
        for number, column in enumerate(columns):
            part = torch.zeros_like(gradient)
            if f"{number}/{name}" in keys:
                part = take_part(trainer, name, file.get_tensor(f"{number}/{name}"))
            if part.shape != gradient.shape:
                return None, None
            column.append(scale * part.double().flatten()[::stride])
    if not right or not count:
        return None, None
    matrix, total = torch.stack([torch.cat(column) for column in columns], 1), torch.cat(right)
    apart = total - matrix.sum(1)
    is_apart = torch.linalg.vector_norm(apart) > 1e-13 * torch.linalg.vector_norm(total)
    return fit_sum(matrix, total), fit_sum(matrix, apart) if bool(is_apart) else None
