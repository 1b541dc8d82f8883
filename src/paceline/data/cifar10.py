"""CIFAR-10 in its binary version: files of records, a label byte and 3,072 pixels each.

A record's pixels are the red, green and blue plane, each 32 x 32 in row-major order.
Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version" (Krizhevsky 2009).
"""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
MEAN = (0.4914, 0.4822, 0.4465)  # of the training images, pixels from 0 to 1
STD = (0.2470, 0.2435, 0.2616)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VALID_FILES = ("test_batch.bin",)
_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Cifar10Part:
    """The records of some files, mapped from disk; pickles as their paths.

    Args:
        paths: the files, in the order of their records.

    Raises:
        PacelineError: PL207 a file cannot be read, PL208 it is not made of CIFAR-10's records.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._files = [_map_file(path) for path in paths]
        self._ends = list(itertools.accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Return a record's image [3, 32, 32] and label."""
        number = bisect.bisect_right(self._ends, index)
        record = self._files[number][index - (self._ends[number - 1] if number else 0)]
        return record[1:].reshape(IMAGE_SHAPE), int(record[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return (Cifar10Part, (self.paths,))


def open_cifar10(folder: Path) -> tuple[Cifar10Part, Cifar10Part]:
    """Return the training and test images in a folder.

    Raises:
        PacelineError: PL207 for a missing folder or file, PL208 for one of another form.
    """
    names = (*TRAIN_FILES, *VALID_FILES)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        saw = f"data.folder={str(folder)!r} has no {', '.join(missing)}."
        if not folder.is_dir():
            saw = f"data.folder={str(folder)!r} is not a folder."
        inner = folder / "cifar-10-batches-bin"
        fix = (
            f"Download the binary version from {_SITE}, unpack it and set data.folder to the folder with "
            "these files."
        )
        if inner.is_dir():
            fix = f"Set data.folder={str(inner)!r}."
        elif (folder / "data_batch_1").exists():
            fix = f"This is the Python version; download the binary version from {_SITE}."
        raise PacelineError(
            "PL207", saw=saw, rule=f"CIFAR-10's binary version consists of {', '.join(names)}.", fix=fix
        )
    train = Cifar10Part([folder / name for name in TRAIN_FILES])
    return train, Cifar10Part([folder / name for name in VALID_FILES])


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Return the records [num_records, 3073] of a file."""
    rule = (
        f"A file of CIFAR-10's binary version consists of whole records of {RECORD_BYTES} bytes (10,000 "
        "of them)."
    )
    fix = f"Download it again from {_SITE}."
    try:
        size = path.stat().st_size
        if size == 0 or size % RECORD_BYTES != 0:
            raise PacelineError("PL208", saw=f"{path} has {size} bytes.", rule=rule, fix=fix)
        records = np.memmap(path, dtype=np.uint8, mode="r", shape=(size // RECORD_BYTES, RECORD_BYTES))
    except OSError as error:
        raise PacelineError(
            "PL207",
            saw=f"{path} cannot be read: {error.strerror or error}.",
            rule="All files of data.folder are used.",
            fix="Change its permissions (chmod +r).",
        ) from None
    labels = records[:, 0]
    if labels.max() >= NUM_CLASSES:
        number = int((labels >= NUM_CLASSES).argmax())
        raise PacelineError(
            "PL208",
            saw=f"{path}: record {number} has label {labels[number]}.",
            rule="A record starts with its label, 0 to 9.",
            fix=fix,
        )
    return records
