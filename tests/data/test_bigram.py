"""The bigram model against one written with dictionaries."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paceline.data import bigram
from paceline.data.bigram import ALPHAS, measure_bigram
from paceline.data.tokens import TokenFile


def token_file(path: Path, values: list[int]) -> TokenFile:
    np.asarray(values, dtype="<u2").tofile(path)
    return TokenFile(path, "<u2", len(values), "")


def by_hand(train: list[int], pairs: list[tuple[int, int]], vocab_size: int) -> float:
    counts = Counter(itertools.pairwise(train))
    firsts = Counter(train[:-1])
    return min(
        -sum(math.log((counts[p] + alpha) / (firsts[p[0]] + alpha * vocab_size)) for p in pairs) / len(pairs)
        for alpha in ALPHAS
    )


@pytest.mark.parametrize("chunk", [1 << 20, 7])
@pytest.mark.parametrize("num_samples", [None, 2, 1000])
def test_same_as_by_hand(
    tmp_path: Path, chunk: int, num_samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bigram, "_CHUNK_TOKENS", chunk)
    rng = np.random.default_rng(0)
    train, valid = rng.integers(0, 9, 300).tolist(), rng.integers(0, 12, 47).tolist()
    # samples of 8: five of them, targets 1 to 40; the ragged end doesn't count
    num_targets = 8 * min(5, num_samples or 5)
    pairs = [(valid[i], valid[i + 1]) for i in range(num_targets)]
    measured = measure_bigram(
        token_file(tmp_path / "train", train),
        token_file(tmp_path / "valid", valid),
        vocab_size=12,
        seq_len=8,
        num_samples=num_samples,
    )
    assert measured == pytest.approx(by_hand(train, pairs, 12), rel=1e-12)


def test_a_text_that_is_known_by_heart(tmp_path: Path) -> None:
    cycle = [0, 1, 2, 3] * 5000
    measured = measure_bigram(
        token_file(tmp_path / "train", cycle),
        token_file(tmp_path / "valid", cycle[:41]),
        vocab_size=4,
        seq_len=10,
    )
    assert 0 < measured < 1e-5
