"""Whether two tensors are the same but for rounding, and what their difference looks like.

A tensor's tolerance is

    factor * max(floor, eps * scale)

floor: the most that any of its elements moved in the reference's own reruns (`reference.py`), in which
microbatches are added up in other orders and every weight starts a last bit away. It knows what rounding
does to this very tensor: nearly nothing to a bias of the head, everything to a gradient whose true value is
0. eps * scale: the last bit of its largest element, for what all reruns happened to agree on. A tensor
that is 0 throughout takes the scale of the largest tensor of its kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# How far a right layout may be from the reference, in units of the noise, by dtype. Right layouts were
# found at 4.4 at most, in fp64 and fp32: replicated, sharded, split, with products in 2 and in 8 parts
# (docs/verify.md); the mildest planted fault, a norm that counts small weights twice, is at 4e12 in fp64.
# 16-bit types have less room between the two: there a tolerance of 8 is 6% of a tensor's largest element.
FACTORS = {"fp64": 100.0, "fp32": 20.0, "bf16": 8.0, "fp16": 8.0}
# Smallest step of what a forward computes in.
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
# How the note of a difference begins that is the right tensor of another rank.
ANOTHERS_PART = "it is the part of rank"
# Tensors whose root-mean-square difference is this share of them were rounded to 16 bits somewhere.
_HALF_PRECISION = (2.0**-14, 2.0**-5)
# Least-squares factors count when they leave less than this of the tensor unexplained.
_UNEXPLAINED = 1e-3


@dataclass(frozen=True)
class Noise:
    """What rounding does to one tensor.

    Attributes:
        floor: the most that any element moved in the reruns.
        scale: the largest element of the reference.
        eps: the relative step of the type that it was computed in.
        factor: how many times an ordinary difference is allowed.
    """

    floor: float
    scale: float
    eps: float
    factor: float

    @property
    def level(self) -> float:
        """The size of an ordinary rounding difference."""
        return max(self.floor, self.eps * self.scale)

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        return self.factor * self.level


@dataclass(frozen=True)
class Difference:
    """A tensor or number of one rank that is not the reference's.

    Attributes:
        step: of the optimizer, from 1; 0 for what was there before the first.
        kind: see `run_steps.KINDS`.
        name: full name, empty for numbers.
        rank: who had it.
        size: the largest difference of an element; infinite where shapes or presence differ.
        tolerance: the largest that is allowed; 0 where the layout promises bits.
        rounding: the largest that rounding explains.
        scale: the largest element of the reference.
        factor: such that the tensor is the reference times this; `None` where it is not.
        share: of the elements, those that differ.
        looks_rounded: whether it is apart by what a 16-bit type rounds away.
        note: what else was seen.
    """

    step: int
    kind: str
    name: str
    rank: int
    size: float
    tolerance: float
    rounding: float
    scale: float
    factor: float | None = None
    share: float = 1.0
    looks_rounded: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        """The difference in units of what is allowed."""
        return divide(self.size, self.tolerance)


def divide(size: float, tolerance: float) -> float:
    """`size / tolerance`, with 0 / 0 = 0."""
    if size == 0:
        return 0.0
    return size / tolerance if tolerance else math.inf


def largest(tensor: Tensor) -> float:
    """The largest absolute value; 0 of an empty tensor."""
    return float(tensor.detach().abs().max().item()) if tensor.numel() else 0.0


def measure_distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of an element; equal infinities and NaN in the same place count as 0.

    Infinite where shapes or types differ, or one is not finite where the other is.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.numel() or torch.equal(one, other):
        return 0.0
    if not one.is_floating_point() and not one.is_complex():
        return float((one.double() - other.double()).abs().max().item())
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0
    found = float(apart.max().item())
    return math.inf if math.isnan(found) else found


def find_factor(reference: Tensor, other: Tensor) -> float | None:
    """The number f with other = f * reference, but for a thousandth of its norm; `None` if there is none."""
    if reference.shape != other.shape or not reference.is_floating_point():
        return None
    a, b = reference.double().flatten(), other.double().flatten()
    square = float(a @ a)
    if not square or not math.isfinite(square):
        return None
    factor = float(a @ b) / square
    left = float(torch.linalg.vector_norm(b - factor * a))
    norm = float(torch.linalg.vector_norm(b))
    return factor if norm and left <= _UNEXPLAINED * norm else None


def share_apart(reference: Tensor, other: Tensor, tolerance: float) -> float:
    """The share of elements that differ by more than the tolerance."""
    if reference.shape != other.shape or not reference.numel():
        return 1.0
    apart = (reference.double() - other.double()).abs()
    return float(((apart > tolerance) | apart.isnan()).double().mean().item())


def looks_rounded(reference: Tensor, other: Tensor) -> bool:
    """Whether a tensor is apart by what a 16-bit type rounds away, and by no more."""
    if reference.shape != other.shape or not reference.is_floating_point() or not reference.numel():
        return False
    a, b = reference.double(), other.double()
    apart, norm = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(a).item()
    low, high = _HALF_PRECISION
    return bool(norm) and low < apart / norm < high


def looks_masked(reference: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether other elements are 0, and those that are 0 in neither agree: as two dropout masks give it."""
    if reference.shape != other.shape or not reference.is_floating_point() or not reference.numel():
        return False
    zero, zero_there = reference == 0, other == 0
    both = ~zero & ~zero_there
    moved = (zero != zero_there).double().mean().item()
    if moved < 1e-3 or not bool(both.any()):
        return False
    agree = ((reference - other).abs() <= tolerance)[both].double().mean().item()
    return agree > 0.9
