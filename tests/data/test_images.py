"""Digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import build_data
from paceline.data.digits import load_digits
from paceline.data.task import TaskData
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
