"""Encodes rows of numbers in fewer bytes, and decodes them: the compression of gradients.

A codec is pure: the bytes of a row depend on that row alone. So a matrix may be cut between any two rows, on
any number of ranks, and every row keeps its bytes.

A row of `length` numbers is divided into blocks of equal length, at most 256. With `int8` and `int4` a block
is a scale, its largest magnitude over 127 or 7, and each number rounded to a multiple of that scale
(block-wise quantisation: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, without their non-linear
levels). With `bf16` there is no scale.

Rows of fewer than 32 numbers, such as those of biases and norms, are sent as they are: a scale each would
save little.

A block with inf or nan decodes to at least one nan, so a step with such a gradient is still skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

# Numbers that share a scale. The scale then costs 1/256 of the numbers.
_BLOCK = 256
# Rows shorter than this are sent as they are.
LEAST_ROW = 32
# Blocks whose largest magnitude is below this are sent as zeros: the inverse of their scale would overflow.
_TINY = 2.0**-100
_SCALE_BYTES = 4


class Codec(ABC):
    """A way to encode rows of fp32 numbers.

    Attributes:
        kind: its name in a recipe.
    """

    kind: str

    @abstractmethod
    def count_row_bytes(self, length: int) -> int:
        """Return the size of an encoded row of `length` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor, target: Tensor) -> None:
        """Encode rows.

        Args:
            rows: fp32, [num_rows, length]; contiguous.
            target: uint8, [num_rows, `count_row_bytes(length)`]; receives the bytes.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, length: int) -> Tensor:
        """Return the rows [num_rows, length], in fp32, of their bytes [num_rows, row_bytes]."""


class _CastCodec(Codec):
    """Sends numbers in another type, or in fp32 unchanged."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.kind, self._dtype = kind, dtype

    def count_row_bytes(self, length: int) -> int:
        return self._dtype.itemsize * length

    def encode(self, rows: Tensor, target: Tensor) -> None:
        target.copy_(rows.to(self._dtype).view(torch.uint8).view(target.shape))

    def decode(self, encoded: Tensor, length: int) -> Tensor:
        return _read(encoded, self._dtype, length).to(torch.float32, copy=True)


class _BlockCodec(Codec):
    """The base of codecs with one scale per block, by which its largest magnitude becomes the highest level.

    The scales of a row are followed by its numbers.
    """

    _most_level: float

    def count_row_bytes(self, length: int) -> int:
        num_blocks, block = _cut(length)
        return num_blocks * _SCALE_BYTES + self._count_bytes(num_blocks * block)

    def encode(self, rows: Tensor, target: Tensor) -> None:
        num_rows, length = rows.shape
        num_blocks, block = _cut(length)
        blocks = _pad(rows, num_blocks * block).view(num_rows, num_blocks, block)
        most = blocks.abs().amax(dim=2, keepdim=True)
        scales, inverses = most / self._most_level, self._most_level / most
        inverses.masked_fill_(most < _TINY, 0.0)
        scales.masked_fill_(most < _TINY, 0.0)
        start = num_blocks * _SCALE_BYTES
        target[:, :start].copy_(scales.view(num_rows, num_blocks).view(torch.uint8))
        target[:, start:].copy_(self._pack((blocks * inverses).view(num_rows, num_blocks * block)))

    def decode(self, encoded: Tensor, length: int) -> Tensor:
        num_rows = len(encoded)
        num_blocks, block = _cut(length)
        start = num_blocks * _SCALE_BYTES
        scales = _read(encoded[:, :start], torch.float32, num_blocks)
        numbers = self._unpack(encoded[:, start:].contiguous(), num_blocks * block)
        numbers.view(num_rows, num_blocks, block).mul_(scales.view(num_rows, num_blocks, 1))
        return numbers if num_blocks * block == length else numbers[:, :length].contiguous()

    @abstractmethod
    def _count_bytes(self, num_numbers: int) -> int:
        """Return the size of the numbers of a row, padded to whole blocks."""

    @abstractmethod
    def _pack(self, numbers: Tensor) -> Tensor:
        """Return the bytes of scaled rows; may overwrite these."""

    @abstractmethod
    def _unpack(self, packed: Tensor, num_numbers: int) -> Tensor:
        """Return scaled rows, fp32 and contiguous, of their bytes."""


class Int8Codec(_BlockCodec):
    """Rounds to 255 levels per block."""

    kind = "int8"
    _most_level = 127.0

    def _count_bytes(self, num_numbers: int) -> int:
        return num_numbers

    def _pack(self, numbers: Tensor) -> Tensor:
        return numbers.round_().to(torch.int8).view(torch.uint8)

    def _unpack(self, packed: Tensor, num_numbers: int) -> Tensor:
        return packed.view(torch.int8).to(torch.float32)


class Int4Codec(_BlockCodec):
    """Rounds to 15 levels per block; the first half of a row is in the lower half bytes."""

    kind = "int4"
    _most_level = 7.0

    def _count_bytes(self, num_numbers: int) -> int:
        return (num_numbers + 1) // 2

    def _pack(self, numbers: Tensor) -> Tensor:
        # Levels are 0 to 14. By way of int8, because the conversion of nan to uint8 is not defined.
        levels = numbers.round_().add_(7.0).to(torch.int8).view(torch.uint8).bitwise_and_(15)
        half = (levels.shape[1] + 1) // 2
        packed = levels[:, :half].contiguous()
        packed[:, : levels.shape[1] - half].bitwise_or_(levels[:, half:] << 4)
        return packed

    def _unpack(self, packed: Tensor, num_numbers: int) -> Tensor:
        numbers = torch.empty(len(packed), num_numbers, dtype=torch.float32, device=packed.device)
        half = packed.shape[1]
        numbers[:, :half] = packed & 15
        numbers[:, half:] = (packed >> 4)[:, : num_numbers - half]
        return numbers.sub_(7.0)


_WHOLE = _CastCodec("fp32", torch.float32)
CODECS: dict[str, Codec] = {
    codec.kind: codec for codec in (_CastCodec("bf16", torch.bfloat16), Int8Codec(), Int4Codec())
}


def choose_codec(codec: Codec, length: int) -> Codec:
    """Return the codec for rows of `length` numbers: fp32 for short ones."""
    return codec if length >= LEAST_ROW else _WHOLE


def _cut(length: int) -> tuple[int, int]:
    """Return the number of blocks of a row, and the numbers in each; the last block may be padded."""
    num_blocks = -(-length // _BLOCK)
    return num_blocks, -(-length // num_blocks)


def _pad(rows: Tensor, length: int) -> Tensor:
    """Return the rows with zeros after them, up to a length."""
    return rows if rows.shape[1] == length else torch.nn.functional.pad(rows, (0, length - rows.shape[1]))


def _read(encoded: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    # A fresh copy is aligned; a row within a message need not be.
    return encoded.clone(memory_format=torch.contiguous_format).view(dtype).view(len(encoded), length)
