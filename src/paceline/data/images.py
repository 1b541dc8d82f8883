"""Samples of images: `{"images": float32 [channels, height, width], "labels": int64 []}`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data import cifar10, digits
from paceline.data.cifar10 import Cifar10Part
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


class Cifar10Images(Dataset[Sample]):
    """CIFAR-10's images, scaled to about zero mean and unit variance per channel."""

    def __init__(self, part: Cifar10Part) -> None:
        self.part = part
        self.mean = torch.tensor(cifar10.MEAN).view(3, 1, 1)
        self.std = torch.tensor(cifar10.STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pixels, label = self.part[index]
        image = torch.tensor(pixels, dtype=torch.float32) / 255  # a copy: the file is mapped read-only
        return {"images": (image - self.mean) / self.std, "labels": torch.tensor(label)}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return many samples at once; torch's loaders call it."""
        return [self[index] for index in indices]
