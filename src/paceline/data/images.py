"""Samples of images: `{"images": float32 [channels, height, width], "labels": int64 []}`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data import digits
from paceline.data.digits import Digits

Sample = dict[str, Tensor]


class DigitImages(Dataset[Sample]):
    """Digits, scaled to about zero mean and unit variance."""

    def __init__(self, part: Digits) -> None:
        self.images = (torch.from_numpy(part.images).float() - digits.MEAN) / digits.STD
        self.labels = torch.from_numpy(part.labels).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return {"images": self.images[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return many samples at once; torch's loaders call it."""
        return [self[index] for index in indices]
