"""The 1,797 handwritten digits that are part of the package.

`digits.npz` holds `images`, uint8 [1797, 8, 8] with values 0 to 16, and `labels`, uint8 [1797]. It is
the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998; UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49), licensed under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/), stored as numpy arrays and otherwise unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_CLASSES = 10
IMAGE_SHAPE = (1, 8, 8)
MEAN = 4.884  # of all pixels
STD = 6.017


@dataclass(frozen=True)
class Digits:
    """A subset of the digits.

    Attributes:
        images: uint8 [num_images, 1, 8, 8], values 0 to 16.
        labels: uint8 [num_images], values 0 to 9.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


def load_digits(valid_fraction: float) -> tuple[Digits, Digits | None]:
    """Return the training and the validation images.

    The split is the same for every seed of a run: `valid_fraction` of one fixed permutation (at
    least one image, if it is not 0) is held out.
    """
    with (resources.files("paceline.data") / "digits.npz").open("rb") as stream, np.load(stream) as arrays:
        images: npt.NDArray[Any] = arrays["images"][:, None]
        labels: npt.NDArray[Any] = arrays["labels"]
    # Philox's raw output is the same in every version of numpy; its shuffles need not be.
    order = np.argsort(np.random.Philox(key=1998).random_raw(len(images)), kind="stable")
    num_valid = max(1, int(valid_fraction * len(images))) if valid_fraction > 0 else 0
    held_out, rest = order[:num_valid], order[num_valid:]
    valid = Digits(images[held_out], labels[held_out]) if num_valid else None
    return Digits(images[rest], labels[rest]), valid
