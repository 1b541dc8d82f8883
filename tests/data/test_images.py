"""Digits and CIFAR-10."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import build_data
from paceline.data.cifar10 import IMAGE_SHAPE, MEAN, RECORD_BYTES, STD, TRAIN_FILES
from paceline.data.digits import load_digits
from paceline.data.task import TaskData
from paceline.errors import PacelineError
from paceline.recipe import parse_recipe


def task(**data: Any) -> TaskData:
    return build_data(parse_recipe({"model": {"kind": "resnet"}, "data": data, "train": {"steps": 1}}))


def test_digits_are_all_there_once() -> None:
    whole, nothing = load_digits(0)
    assert nothing is None
    assert whole.images.shape == (1797, 1, 8, 8)
    assert (whole.images.min(), whole.images.max()) == (0, 16)
    # how often each digit occurs, as the data set's description says
    assert np.bincount(whole.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    train, valid = load_digits(0.2)
    assert valid is not None
    assert len(valid.labels) == 359
    rows = [tuple(image.flatten()) for part in (train, valid) for image in part.images]
    assert sorted(rows) == sorted(tuple(image.flatten()) for image in whole.images)


def test_digits_split_is_one_for_all_and_mixed() -> None:
    first, again = load_digits(0.2)[1], load_digits(0.2)[1]
    assert first is not None
    assert again is not None
    assert np.array_equal(first.labels, again.labels)
    assert first.labels[:12].tolist() == KNOWN_LABELS
    assert np.bincount(first.labels, minlength=10).min() > 20
    tiny = load_digits(1e-9)[1]
    assert tiny is not None
    assert len(tiny.labels) == 1


KNOWN_LABELS = [1, 1, 5, 6, 3, 0, 1, 5, 6, 9, 5, 7]


def test_digits_samples() -> None:
    data = task(kind="digits")
    assert (data.num_classes, data.image_shape, data.vocab_size) == (10, (1, 8, 8), None)
    samples = data.train.__getitems__(range(len(data.train)))
    images = torch.stack([sample["images"] for sample in samples])
    assert images.dtype == torch.float32
    assert images.mean().item() == pytest.approx(0, abs=0.02)
    assert images.std().item() == pytest.approx(1, abs=0.02)
    assert samples[0]["labels"].dtype == torch.int64
    assert samples[0]["labels"].shape == ()
    assert task(kind="digits", valid_fraction=0.0).valid is None


def cifar_folder(folder: Path) -> Path:
    """Five records per file; pixel values tell file, plane and place."""
    folder.mkdir()
    for number, name in enumerate((*TRAIN_FILES, "test_batch.bin")):
        records = np.zeros((5, RECORD_BYTES), dtype=np.uint8)
        records[:, 0] = [(number + record) % 10 for record in range(5)]
        records[:, 1] = 10 * number + np.arange(5)  # red, first pixel
        records[:, 1 + 1024 + 32] = 100  # green, second row, first column
        records[:, -1] = 255  # blue, last pixel
        records.tofile(folder / name)
    return folder


def test_cifar10_records(tmp_path: Path) -> None:
    data = task(kind="cifar10", folder=str(cifar_folder(tmp_path / "cifar")))
    assert (data.num_classes, data.image_shape) == (10, IMAGE_SHAPE)
    assert data.valid is not None
    assert (len(data.train), len(data.valid)) == (25, 5)
    assert [int(data.train[i]["labels"]) for i in (0, 4, 5, 24)] == [0, 4, 1, 8]
    sample = data.train[13]  # the fourth record of the third file
    assert sample["images"].shape == IMAGE_SHAPE
    assert sample["images"].dtype == torch.float32
    pixels = sample["images"] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    expected = torch.zeros(IMAGE_SHAPE)
    expected[0, 0, 0], expected[1, 1, 0], expected[2, 31, 31] = 23 / 255, 100 / 255, 1
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)
    with pytest.raises(IndexError):
        data.train[25]


def test_cifar10_pickles_as_paths(tmp_path: Path) -> None:
    data = task(kind="cifar10", folder=str(cifar_folder(tmp_path / "cifar")))
    packed = pickle.dumps(data.train)
    assert len(packed) < 3000
    copy = pickle.loads(packed)
    assert torch.equal(copy[7]["images"], data.train[7]["images"])


def break_folder(folder: Path, how: str) -> Path:
    path = folder / "data_batch_2.bin"
    match how:
        case "no folder":
            return folder / "nothing"
        case "no file":
            path.unlink()
        case "python version":
            for name in os.listdir(folder):
                (folder / name).rename(folder / name.removesuffix(".bin"))
        case "folder above":
            inner = folder / "cifar-10-batches-bin"
            inner.mkdir()
            for file in folder.glob("*.bin"):
                file.rename(inner / file.name)
        case "short":
            os.truncate(path, 5 * RECORD_BYTES - 1)
        case "empty":
            os.truncate(path, 0)
        case "labels":
            records = np.fromfile(path, dtype=np.uint8)
            records[3 * RECORD_BYTES] = 77
            records.tofile(path)
    return folder


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("no folder", "PL207", "is not a folder"),
        ("no file", "PL207", "has no data_batch_2.bin"),
        ("python version", "PL207", "This is the Python version"),
        ("folder above", "PL207", "cifar-10-batches-bin'"),
        ("short", "PL208", "data_batch_2.bin has 15364 bytes"),
        ("empty", "PL208", "data_batch_2.bin has 0 bytes"),
        ("labels", "PL208", "record 3 has label 77"),
    ],
)
def test_cifar10_mistakes(tmp_path: Path, how: str, code: str, says: str) -> None:
    folder = break_folder(cifar_folder(tmp_path / "cifar"), how)
    with pytest.raises(PacelineError) as caught:
        task(kind="cifar10", folder=str(folder))
    assert caught.value.code == code
    assert says in str(caught.value)
