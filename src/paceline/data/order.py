"""The order of an epoch: a permutation that nobody has to hold in memory.

Which sample stands at which place of an epoch is a function of (seed, epoch, place) alone. Neither
the number of ranks nor the place where a run was resumed enters, so any rank can compute any slice
of the order, and a run that goes on under another world size goes on in the same order.

The permutation is a Feistel network (Luby and Rackoff 1988) over the next power of two, cut down to
`num_samples` by cycle walking (Black and Rogaway 2002, section 3): a place that lands outside is
permuted again until it lands inside, on average less than once. Tiny sets, where a Feistel network
mixes poorly, are sorted by hashed keys instead, which costs at most 8 KiB.

Everything is integer arithmetic written out here: the orders of numpy's and torch's generators may
change between their versions (NEP 19), and an order must survive an upgrade in the middle of a run.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10
"""Rounds of the network; 4 suffice for a pseudorandom permutation with ideal round functions (Luby
and Rackoff 1988), the rest makes up for short halves."""

SORTED_BELOW = 1024
"""Sets smaller than this are sorted by hashed keys."""

_Words = NDArray[np.uint64]


def order_slice(
    num_samples: int, start: int, stop: int, *, seed: int, epoch: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Gives the samples at places `start` to `stop` (excluded) of an epoch's order.

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
    places = np.arange(start, stop, dtype=np.int64)
    if not shuffle:
        return places
    if num_samples < SORTED_BELOW:
        return _sorted_order(num_samples, seed, epoch)[start:stop].copy()
    return _walk(places.astype(np.uint64), num_samples, _keys(seed, epoch)).astype(np.int64)


@functools.lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """One key per round. Hashed, so that (seed 1, epoch 2) and (seed 2, epoch 1) have nothing in common."""
    text = f"paceline order 1: seed {seed}, epoch {epoch}"
    digest = hashlib.shake_256(text.encode()).digest(8 * NUM_ROUNDS)
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))


@functools.lru_cache(maxsize=64)
def _sorted_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    keys = _keys(seed, epoch)
    noise = _mix(_mix(np.arange(num_samples, dtype=np.uint64), keys[0]), keys[1])
    return np.argsort(noise, kind="stable").astype(np.int64)


def _walk(places: _Words, num_samples: int, keys: tuple[np.uint64, ...]) -> _Words:
    num_bits = (num_samples - 1).bit_length()
    places = _feistel(places, num_bits, keys)
    outside = np.flatnonzero(places >= num_samples)
    while outside.size:
        again = _feistel(places[outside], num_bits, keys)
        places[outside] = again
        outside = outside[again >= num_samples]
    return places


def _feistel(values: _Words, num_bits: int, keys: tuple[np.uint64, ...]) -> _Words:
    """Permutes `range(2**num_bits)`. Each round changes one half by a function of the other, so that
    it can be undone whatever the function is; halves may differ by a bit."""
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high = high ^ (_mix(low, key) & high_mask)
        else:
            low = low ^ (_mix(high, key) & low_mask)
    return (high << low_bits) | low


def _mix(values: _Words, key: np.uint64) -> _Words:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, figure 14) on value xor key."""
    words = values ^ key
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
