"""Decides whether two tensors are equal up to rounding, and describes their difference.

The tolerance of a tensor is

    factor * max(floor, eps * scale)

floor: the most that any of its elements moved in the reference's own reruns (`reference.py`), which add
microbatches in other orders and start every weight one last bit away. It measures the effect of rounding on
this very tensor: almost none on a bias of the head, everything on a gradient whose true value is 0. eps *
scale: the last bit of its largest element, for tensors on which all reruns happened to agree. A tensor that
is 0 throughout takes the scale of the largest tensor of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The allowed distance of a correct layout from the reference, in units of the noise, by dtype. The largest
# distance measured for correct layouts is 4.4, in fp64 and fp32: replicated, sharded, split, with products in
# 2 and in 8 parts (docs/verify.md). The mildest planted fault, a norm that counts small weights twice, is at
# 4e12 in fp64. 16-bit types have less room between the two: a tolerance of 8 is 6% of a tensor's largest
# element.
FACTORS = {"fp64": 100.0, "fp32": 20.0, "bf16": 8.0, "fp16": 8.0}
# The smallest relative step of the type that a forward computes in.
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
# Bits of the significand of narrower types, and the bits that a sum of a few such numbers may take.
_SIGNIFICANDS = {"bf16": (8, 16), "fp16": (11, 13), "fp32": (24, 14)}
_FP32_DIGITS = 24
# Maximum distance, in binary digits, between a difference and the rounding error of its type.
_FAR = 4.0
# Fewer elements than these do not identify a type; of more, this share must agree.
_LEAST_ROUNDED = 4
_NEARLY_ALL = 0.9
# Least-squares factors count when they leave less than this of the tensor unexplained.
_UNEXPLAINED = 1e-3


@dataclass(frozen=True)
class Noise:
    """The effect of rounding on one tensor.

    Attributes:
        floor: the most that any element moved in the reruns.
        scale: the largest element of the reference.
        eps: the relative step of the type that it was computed in.
        factor: the number of ordinary differences that are allowed.
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
    """A tensor or number of one rank that differs from the reference's.

    Attributes:
        step: of the optimizer, from 1; 0 for the state before the first.
        kind: see `run_steps.KINDS`.
        name: full name, empty for numbers.
        rank: the rank that had it.
        size: the largest difference of an element; infinite if shapes or presence differ.
        tolerance: the largest that is allowed; 0 if the layout promises bits.
        rounding: the largest that rounding explains.
        scale: the largest element of the reference.
        factor: the tensor is the reference times this; `None` if there is no such number.
        rounded_to: the narrower type that its values were rounded to, empty for none.
        note: further observations, as text.
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
    rounded_to: str = ""
    note: str = ""

    @property
    def ratio(self) -> float:
        """The difference in units of its tolerance."""
        return divide(self.size, self.tolerance)


def divide(size: float, tolerance: float) -> float:
    """Return `size / tolerance`, with 0 / 0 = 0."""
    if size == 0:
        return 0.0
    return size / tolerance if tolerance else math.inf


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor."""
    return float(tensor.detach().abs().max().item()) if tensor.numel() else 0.0


def measure_distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of an element; equal infinities and NaN in the same place count as 0.

    It is infinite if shapes or types differ, or if one is not finite where the other is.
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
    """Return f with other = f * reference up to a thousandth of its norm; `None` if there is none."""
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


def find_rounding(reference: Tensor, other: Tensor, scales: Sequence[float] = (1.0,)) -> str:
    """Return the narrower type that `other` was rounded to: `"bf16"`, `"fp16"`, `"fp32"`, or `""` for none.

    Two things must hold for nearly all elements that differ. Their significands are as short as that type
    makes them, or a sum of a few such numbers. And the differences have the size of that rounding.

    Args:
        reference: before the rounding.
        other: after it.
        scales: numbers by which `other` may have been divided since it was rounded.
    """
    if reference.shape != other.shape or reference.dtype != other.dtype or not other.is_floating_point():
        return ""
    a, b = reference.detach().flatten(), other.detach().flatten()
    differs = (a != b) & (b != 0) & b.isfinite() & a.isfinite()
    if int(differs.sum()) < _LEAST_ROUNDED:
        return ""
    a, b = a[differs].double(), b[differs].double()
    digits = 1 - round(math.log2(torch.finfo(other.dtype).eps))
    apart = -math.log2(max(1e-300, float(((a - b).abs() / a.abs().clamp(min=1e-300)).median())))
    # The median error of a rounding to n bits is near 2**-(n + 1.6); the type that is nearest to it is
    # tested.
    name = min(_SIGNIFICANDS, key=lambda kind: abs(apart - _SIGNIFICANDS[kind][0] - 1.6))
    bits, spare = _SIGNIFICANDS[name]
    if bits >= digits or abs(apart - bits - 1.6) > _FAR:
        return ""
    room = bits + spare if digits > _FP32_DIGITS else bits + 3
    is_short = any(_share_short(b * scale, room, digits) >= _NEARLY_ALL for scale in scales)
    return name if is_short else ""


def _share_short(values: Tensor, bits: int, digits: int) -> float:
    """Return the share of values whose significand fits into `bits`, except for the last two of `digits`."""
    significand, _ = torch.frexp(values)
    whole = torch.ldexp((torch.ldexp(significand, torch.tensor(bits))).round(), torch.tensor(-bits))
    return float(((significand - whole).abs() <= 2.0 ** (2 - digits)).double().mean())


def looks_masked(reference: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two dropout masks explain the difference: other elements are 0, and the rest agrees."""
    if reference.shape != other.shape or not reference.is_floating_point() or not reference.numel():
        return False
    zero, zero_there = reference == 0, other == 0
    both = ~zero & ~zero_there
    moved = (zero != zero_there).double().mean().item()
    if moved < 1e-3 or not bool(both.any()):
        return False
    agree = ((reference - other).abs() <= tolerance)[both].double().mean().item()
    return agree > 0.9
