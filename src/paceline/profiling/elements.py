"""Counts the bytes of tensors from their sizes and the names that torch's records use for types."""

from __future__ import annotations

from collections.abc import Sequence

_TYPE_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char", "int8"), 1),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "long int", "complexfloat", "c10::complex<float>"), 8),
}


def count_bytes(size: Sequence[object], dtype: object) -> int | None:
    """Return the bytes of a tensor; `None` if a length is no number or the type is unknown."""
    width = _TYPE_BYTES.get(dtype.lower()) if isinstance(dtype, str) else None
    if width is None:
        return None
    for length in size:
        if not isinstance(length, int):
            return None
        width *= length
    return width
