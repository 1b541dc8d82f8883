"""Codecs: what they lose, what they send, and that a row's bytes depend on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.comm.codec import CODECS, LEAST_ROW, Codec, choose_codec

LENGTHS = (32, 33, 128, 144, 257, 300, 1024)
# The largest error, as a share of the largest magnitude of a block.
ERRORS = {"bf16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def draw(num_rows: int, length: int) -> Tensor:
    rows = torch.randn(num_rows, length, generator=torch.Generator().manual_seed(length))
    rows[0] = 0
    rows[1] *= 1e-36
    rows[2] *= 1e36
    return rows


def choose(kind: str, length: int) -> Codec:
    return choose_codec(CODECS[kind], length)


def encode(kind: str, rows: Tensor) -> Tensor:
    codec = choose(kind, rows.shape[1])
    target = torch.empty(len(rows), codec.count_row_bytes(rows.shape[1]), dtype=torch.uint8)
    codec.encode(rows, target)
    return target


@pytest.mark.parametrize("kind", list(CODECS))
@pytest.mark.parametrize("length", LENGTHS)
def test_errors_are_small_and_rows_are_independent(kind: str, length: int) -> None:
    rows = draw(24, length)
    encoded = encode(kind, rows)
    decoded = choose(kind, length).decode(encoded, length)
    most = rows.abs().amax(dim=1)
    errors = (decoded - rows).abs().amax(dim=1)
    is_normal = most > 1e-30  # smaller ones are sent as zeros by some codecs, and stay in the residual
    assert bool((errors[is_normal] <= ERRORS[kind] * most[is_normal]).all())
    assert bool((errors[~is_normal] <= most[~is_normal]).all())
    for start, stop in ((0, 1), (3, 8), (23, 24)):
        assert torch.equal(encode(kind, rows[start:stop].contiguous()), encoded[start:stop])


@pytest.mark.parametrize("kind", list(CODECS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_so(kind: str, bad: float) -> None:
    for length in (8, *LENGTHS):
        rows = draw(6, length)
        rows[4, length - 1] = bad
        decoded = choose(kind, length).decode(encode(kind, rows), length)
        assert not decoded[4].isfinite().all()
        assert decoded[5].isfinite().all()


def test_short_rows_are_sent_as_they_are() -> None:
    rows = draw(6, LEAST_ROW - 1)
    for kind in CODECS:
        assert torch.equal(choose(kind, LEAST_ROW - 1).decode(encode(kind, rows), LEAST_ROW - 1), rows)


def test_the_bytes_of_a_row() -> None:
    sizes = {kind: choose(kind, 1024).count_row_bytes(1024) for kind in CODECS}
    assert sizes == {"bf16": 2048, "int8": 1024 + 16, "int4": 512 + 16}


@pytest.mark.parametrize("kind", list(CODECS))
@pytest.mark.parametrize("most", [65504.0, 65536.0, 1e6, 1e30, 3e38])
def test_numbers_beyond_fp16_do_not_overflow(kind: str, most: float) -> None:
    rows = draw(8, 256)[3:]
    rows = rows / rows.abs().amax(dim=1, keepdim=True) * most
    decoded = choose(kind, 256).decode(encode(kind, rows), 256)
    assert decoded.isfinite().all()
    assert torch.allclose(decoded.abs().amax(dim=1), rows.abs().amax(dim=1), rtol=0.01)
