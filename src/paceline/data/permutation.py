"""Computes the order of an epoch: a permutation that is never held in memory.

The sample at a place of an epoch is a function of (seed, epoch, place) alone, not of the number of ranks or
of the place where a run was resumed. So any rank can compute any slice of the order, and a run that resumes
with another world size continues in the same order.

The permutation is a Feistel network (Luby and Rackoff 1988) with modular addition over a rectangle of
about sqrt(num_samples) on each side, and cycle walking for the few places that the rectangle has too
many (Black and Rogaway 2002, sections 4 and 5): a place outside is permuted again until it is inside. Tiny
sets, where a Feistel network mixes poorly, are sorted by hashed keys instead, which costs at most 8 KiB.

Everything is integer arithmetic written out here: the orders of numpy's and torch's generators may
change between their versions (NEP 19), and an order must survive an upgrade in the middle of a run.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10
"""Rounds of the network; 4 suffice for a pseudorandom permutation with ideal round functions (Luby
and Rackoff 1988), the rest makes up for short halves."""

SORTED_BELOW = 1024
"""Sets smaller than this are sorted by hashed keys."""

SMALL_SLICE = 256
"""Slices smaller than this are cut from kept blocks: most of the cost of a small one is numpy's per
call (0.11 ms for 16 places, 0.34 ms for 1024)."""

BLOCK_SIZE = 1024

_Words = NDArray[np.uint64]


def order_slice(
    num_samples: int, start: int, stop: int, *, seed: int, epoch: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Return the samples at places `start` to `stop` (excluded) of an epoch's order.

    Time and memory are proportional to the slice, whatever `num_samples` is.

    Args:
        num_samples: size of the data set, less than 2**62.
        start: first place, `0 <= start <= stop`.
        stop: place after the last one, at most `num_samples`.
        seed: any integer.
        epoch: any integer.
        shuffle: False gives the samples as they stand in the data set.

    Returns:
        int64 [stop - start]: indices in `range(num_samples)`. Over all places each occurs once.
    """
    assert 0 <= start <= stop <= num_samples < 2**62, (num_samples, start, stop)
    if not shuffle:
        return np.arange(start, stop, dtype=np.int64)
    if start == stop:
        return np.empty(0, dtype=np.int64)
    if num_samples < SORTED_BELOW:
        return _sorted_order(num_samples, seed, epoch)[start:stop].copy()
    if stop - start >= SMALL_SLICE:
        return _permute(num_samples, start, stop, seed, epoch)
    blocks = [
        _kept_block(num_samples, number, seed, epoch)
        for number in range(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE))
    ]
    offset = start // BLOCK_SIZE * BLOCK_SIZE
    return np.concatenate(blocks)[start - offset : stop - offset]


@functools.lru_cache(maxsize=8)
def _kept_block(num_samples: int, number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    start = number * BLOCK_SIZE
    return _permute(num_samples, start, min(start + BLOCK_SIZE, num_samples), seed, epoch)


@functools.lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """Return one key per round, hashed so that (seed 1, epoch 2) and (seed 2, epoch 1) share nothing."""
    text = f"paceline order 1: seed {seed}, epoch {epoch}"
    digest = hashlib.shake_256(text.encode()).digest(8 * NUM_ROUNDS)
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))


@functools.lru_cache(maxsize=64)
def _sorted_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    keys = _keys(seed, epoch)
    noise = _mix(_mix(np.arange(num_samples, dtype=np.uint64), keys[0]), keys[1])
    return np.argsort(noise, kind="stable").astype(np.int64)


def _permute(num_samples: int, start: int, stop: int, seed: int, epoch: int) -> NDArray[np.int64]:
    keys = _keys(seed, epoch)
    width = math.isqrt(num_samples - 1) + 1
    height = -(-num_samples // width)
    places = _feistel(np.arange(start, stop, dtype=np.uint64), width, height, keys)
    outside = np.flatnonzero(places >= num_samples)
    while outside.size:
        again = _feistel(places[outside], width, height, keys)
        places[outside] = again
        outside = outside[again >= num_samples]
    return places.astype(np.int64)


def _feistel(values: _Words, width: int, height: int, keys: tuple[np.uint64, ...]) -> _Words:
    """Permute `range(width * height)`. Each round adds to one coordinate a function of the other, which can
    be subtracted again whatever the function is."""
    rows, columns = np.divmod(values, np.uint64(width))
    for number, key in enumerate(keys):
        changed, other, size = (rows, columns, height) if number % 2 == 0 else (columns, rows, width)
        noise = _mix(other, key)
        noise >>= np.uint64(2)  # so that the sum cannot overflow
        changed += noise
        changed %= np.uint64(size)
    rows *= np.uint64(width)
    rows += columns
    return rows


def _mix(values: _Words, key: np.uint64) -> _Words:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood 2014, figure 14) on value xor key."""
    words = values ^ key
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
