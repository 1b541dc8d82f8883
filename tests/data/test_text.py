"""Samples of text."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.text import IGNORED, MaskedTokens, NextTokens
from paceline.data.tokens import TokenFile


def token_file(tmp_path: Path, values: list[int] | np.ndarray[Any, Any], dtype: str = "<u2") -> TokenFile:
    array = np.asarray(values, dtype=dtype)
    array.tofile(tmp_path / "tokens.bin")
    return TokenFile(tmp_path / "tokens.bin", dtype, len(array), "")


def masked(part: TokenFile, **keys: Any) -> MaskedTokens:
    settings = {"vocab_size": 1000, "mask_fraction": 0.15, "seed": 3} | keys
    return MaskedTokens(part, 10, **settings)


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    data = NextTokens(token_file(tmp_path, list(range(25))), 8)
    assert len(data) == 3
    for index in range(3):
        assert data[index]["ids"].tolist() == list(range(8 * index, 8 * index + 8))
        assert data[index]["targets"].tolist() == list(range(8 * index + 1, 8 * index + 9))
        assert data[index]["ids"].dtype == data[index]["targets"].dtype == torch.int64


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(0, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_the_ragged_end_is_dropped(tmp_path: Path, num_tokens: int, num_samples: int) -> None:
    data = NextTokens(token_file(tmp_path, [1] * num_tokens), 8)
    assert len(data) == num_samples
    with pytest.raises(IndexError):
        data[num_samples]
    with pytest.raises(IndexError):
        data[-1]


def test_many_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    part = token_file(tmp_path, list(range(100)))
    for data in (NextTokens(part, 8), masked(part)):
        for sample, index in zip(data.__getitems__([5, 0, 7]), [5, 0, 7], strict=True):
            assert all(torch.equal(sample[key], data[index][key]) for key in ("ids", "targets"))


def test_pickles_small_and_collates(tmp_path: Path) -> None:
    data = NextTokens(token_file(tmp_path, list(range(50_000))), 8)
    packed = pickle.dumps(data)
    assert len(packed) < 1000
    assert pickle.loads(packed)[100]["ids"].tolist() == data[100]["ids"].tolist()
    batch = next(iter(DataLoader(data, batch_size=64)))
    assert batch["ids"].flatten().tolist() == list(range(512))


def test_masks_are_berts(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 200_001)
    data = masked(token_file(tmp_path, tokens))
    samples = data.__getitems__(range(len(data)))
    ids = torch.stack([sample["ids"] for sample in samples]).flatten()
    targets = torch.stack([sample["targets"] for sample in samples]).flatten()
    original = torch.from_numpy(tokens[: len(ids)])
    chosen = targets != IGNORED
    assert torch.equal(targets[chosen], original[chosen])
    assert torch.equal(ids[~chosen], original[~chosen])
    # 15% of the tokens; samples that would have none (0.85^10 of them) get one
    assert chosen.float().mean().item() == pytest.approx(0.15 + 0.85**10 / 10, abs=0.005)
    assert (ids[chosen] == 1000).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (ids[chosen] == original[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.01)
    swapped = ids[chosen & (ids != original) & (ids != 1000)]
    assert len(swapped) / chosen.sum().item() == pytest.approx(0.1, abs=0.01)
    assert 0 <= swapped.min() < 20
    assert 980 < swapped.max() < 1000


def test_at_least_one_target(tmp_path: Path) -> None:
    data = masked(token_file(tmp_path, [1] * 2001), mask_fraction=1e-9)
    counts = [(sample["targets"] != IGNORED).sum().item() for sample in data.__getitems__(range(200))]
    assert counts == [1] * 200


def test_masks_depend_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    part = token_file(tmp_path, [1] * 2001)

    def build(**keys: Any) -> MaskedTokens:
        return MaskedTokens(part, 100, **({"vocab_size": 1000, "mask_fraction": 0.5, "seed": 3} | keys))

    def targets(data: MaskedTokens, epoch: int, index: int = 7) -> list[int]:
        data.set_epoch(epoch)
        return data[index]["targets"].tolist()

    one, two = build(), build()
    two.__getitems__([3, 9, 1])  # what was asked before doesn't matter
    assert targets(one, 4) == targets(two, 4)
    assert targets(pickle.loads(pickle.dumps(one)), 4) == targets(one, 4)
    different = [
        targets(one, 4),
        targets(one, 5),
        targets(one, 4, index=8),
        targets(build(seed=4), 4),
        targets(build(seed=2**64 + 4), 5),
        targets(build(fixed=True), 4),
    ]
    assert len({tuple(entry) for entry in different}) == len(different)
    valid = build(fixed=True)
    assert targets(valid, 4) == targets(valid, 5)


def test_a_known_mask(tmp_path: Path) -> None:
    # masks are part of a run's result: another numpy must give the same
    data = masked(token_file(tmp_path, list(range(100))), seed=0)
    data.set_epoch(1)
    assert [data[i]["ids"].tolist() for i in range(2)] == KNOWN


KNOWN = [[0, 1, 2, 3, 4, 1000, 6, 7, 8, 9], [10, 11, 12, 1000, 1000, 15, 16, 17, 18, 19]]
