"""Computes masks as a pure function of (seed, sample, name of the draw, position): no generator, no state.

Each element's 32 random bits are a hash of its identity. A rank thus computes only the part that it holds, in
any order, on any device. Integer arithmetic wraps in the same way everywhere, so CPU and CUDA agree to the
bit.

    key(sample)  = blake2b(seed, name, sample)               64 bits, on the host
    row          = splitmix64(key + row number * odd)        per run of the last dimension
    column       = splitmix64(column number * odd)           cached
    element      = murmur(row + column), kept where it is at least p * 2^32

The two mixing steps per element are those of MurmurHash3's finaliser without the last shift: only the high
bits decide. Shifts are arithmetic, because torch has no others on signed integers. x ^ (x >> k) is invertible
all the same, so no information is lost. It takes a quarter of `bernoulli_`'s time.

Sources: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (counter-based generators);
Steele et al. 2014, "Fast splittable pseudorandom number generators"; Appleby's MurmurHash3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.parallel.split import Split


@dataclass(frozen=True)
class Cut:
    """This rank's part of a dropped tensor: one dimension seen as [outer, num_parts, rest].

    `parallel/split.py` describes parameters the same way.

    Attributes:
        dim: the dimension, not negative.
        outer: how often the divided part repeats.
        num_parts: number of parts.
        part: number of this rank's part.
        runs: of positions that are divided otherwise, this rank's runs of consecutive ones, each as its first
            position and its length; `outer`, `num_parts` and `part` are then not used.
        length: of the whole dimension, with `runs`.
        folded: whether the dimension is [samples, rest]; `outer` then counts within one sample.
    """

    dim: int
    outer: int
    num_parts: int
    part: int
    runs: tuple[tuple[int, int], ...] | None = None
    length: int = 0
    folded: bool = False

    @classmethod
    def of(cls, split: Split, part: int, num_samples: int) -> Cut:
        """Return a rank's part of a tensor of `num_samples` samples that is split."""
        folded = split.dim == 0 and split.outer % num_samples == 0
        outer = split.outer // num_samples if folded else split.outer
        return cls(split.dim, outer, split.num_ranks, part, folded=folded)

    def fits(self, place: SampleDim) -> bool:
        """Return whether the dimension holds samples as far as their place in the tensor says so."""
        return self.folded and place.folded if self.dim == place.dim else not self.folded

    def whole(self, length: int) -> int:
        """Return the length of the whole dimension, from that of this rank's part."""
        return length * self.num_parts if self.runs is None else self.length


@dataclass(frozen=True)
class SampleDim:
    """The place of the samples in a tensor.

    Attributes:
        dim: the samples' dimension, 0 or 1; `None` if there is none.
        folded: whether dimension 0 is [samples, rest].
    """

    dim: int | None
    folded: bool = False


def place_samples(size: Sequence[int], num_samples: int, cuts: Sequence[Cut] = ()) -> SampleDim:
    """Return the samples' dimension of a tensor.

    It is dimension 0 if that is as long as there are samples, else dimension 1 (sequence-first models), else
    dimension 0 is [samples, rest] if it is a multiple. Sizes are compared as they are without cuts.
    """
    whole = list(size)
    for cut in cuts:
        whole[cut.dim] = cut.whole(whole[cut.dim])
    if whole and whole[0] == num_samples:
        return SampleDim(0)
    if len(whole) > 1 and whole[1] == num_samples:
        return SampleDim(1)
    if whole and whole[0] and num_samples and whole[0] % num_samples == 0:
        return SampleDim(0, folded=True)
    return SampleDim(None)


def draw_mask(
    seed: int,
    key: str,
    samples: Sequence[int],
    size: Sequence[int],
    p: float,
    device: torch.device,
    *,
    place: SampleDim,
    cuts: Sequence[Cut] = (),
) -> Tensor:
    """Return the mask of the kept elements: bool of `size`, each True with probability 1 - p.

    Args:
        p: probability of an element to be dropped, from 0 to 1.
        seed, key, samples, size, device, place, cuts: as for `draw_bits`.
    """
    if p <= 0 or p >= 1 or not math.prod(size):
        return torch.full(list(size), p < 1, dtype=torch.bool, device=device)
    return draw_bits(seed, key, samples, size, device, place=place, cuts=cuts) >= _threshold(p)


def draw_bits(
    seed: int,
    key: str,
    samples: Sequence[int],
    size: Sequence[int],
    device: torch.device,
    *,
    place: SampleDim,
    cuts: Sequence[Cut] = (),
) -> Tensor:
    """Return 32 random bits for each element: int32 of `size`.

    Args:
        seed: of the run, the step and everything else that separates draws.
        key: name of the draw.
        samples: numbers of the samples in the global batch, in the order in which the tensor holds them.
        place: the place of the samples; without a dimension the first sample's number stands for all.
        cuts: the part of the whole tensor that this rank has.
    """
    if place.dim is None:
        samples = samples[:1]
        positions = list(size)
        cut_at = {cut.dim: cut for cut in cuts}
    elif place.folded:
        positions = [size[0] // len(samples), *size[1:]]
        cut_at = {cut.dim: cut for cut in cuts}
    else:
        positions = [length for dim, length in enumerate(size) if dim != place.dim]
        assert all(cut.dim != place.dim for cut in cuts), (key, place, cuts)
        cut_at = {cut.dim - (cut.dim > place.dim): cut for cut in cuts}
    described = tuple((length, cut_at.get(dim)) for dim, length in enumerate(positions)) or ((1, None),)
    # Positions count in the whole tensor and within one sample, so no rank's share changes a number.
    numbers, columns = _number_positions(described, device)
    rows = _mix64(_derive_keys(seed, key, samples, device) + numbers)
    rows = (rows >> 32).to(torch.int32).view(len(samples), *positions[:-1], 1)
    if place.dim == 1 and rows.dim() > 2:
        bits = rows.transpose(0, 1) + columns  # so that the passes below run over memory in order
    elif place.dim == 1:
        bits = (rows + columns).transpose(0, 1)
    else:
        bits = rows + columns
    bits ^= bits >> 16
    bits *= _signed32(0x85EBCA6B)
    bits ^= bits >> 13
    bits *= _signed32(0xC2B2AE35)
    return bits.view(list(size))


def _threshold(p: float) -> int:
    """Return the least signed 32-bit number that is kept."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _derive_keys(seed: int, key: str, samples: Sequence[int], device: torch.device) -> Tensor:
    """Return a 64-bit key per sample, int64 [samples, 1]."""
    prefix = hashlib.blake2b(f"{seed}/{key}/".encode(), digest_size=8)
    digests = bytearray()
    for sample in samples:
        digest = prefix.copy()
        digest.update(b"%d" % sample)
        digests += digest.digest()
    keys = torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64).reshape(-1, 1))
    return keys if device.type == "cpu" else keys.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def _number_positions(
    described: tuple[tuple[int, Cut | None], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return row numbers times an odd number, int64 [1, rows], and column offsets, int32 [length].

    Both are of positions inside one whole sample. The offsets are random, one per place of the last
    dimension. Cached: 8 bytes per row and 4 per column.
    """
    *rows, last = (_number_dim(length, cut) for length, cut in described)
    numbers, stride = torch.zeros(1, dtype=torch.int64), 1
    for index, whole in reversed(rows):
        numbers = (index[:, None] * stride + numbers[None, :]).flatten()
        stride *= whole
    columns = (_mix64(last[0] * _signed64(0xD1342543DE82EF95)) >> 32).to(torch.int32)
    return ((numbers + 1) * _signed64(0x9E3779B97F4A7C15))[None].to(device), columns.to(device)


def _number_dim(length: int, cut: Cut | None) -> tuple[Tensor, int]:
    """Return this rank's places along a whole dimension, and the length of the whole dimension."""
    if cut is None:
        return torch.arange(length), length
    whole = cut.whole(length)
    if cut.runs is not None:
        return torch.cat([torch.arange(first, first + number) for first, number in cut.runs]), whole
    assert length % cut.outer == 0, (length, cut)
    return torch.arange(whole).view(cut.outer, cut.num_parts, -1)[:, cut.part].flatten(), whole


def _mix64(x: Tensor) -> Tensor:
    """Return splitmix64's output function of a tensor, which is overwritten."""
    x ^= x >> 30
    x *= _signed64(0xBF58476D1CE4E5B9)
    x ^= x >> 27
    x *= _signed64(0x94D049BB133111EB)
    x ^= x >> 31
    return x


def _signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
