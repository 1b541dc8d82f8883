"""Recognises torch's errors for exhausted memory, and reads how much was asked for.

torch is not imported here: a rank's watch starts before its script imports torch.
"""

from __future__ import annotations

import re
import sys

_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
_BYTES = re.compile(r"(?:tried|trying|not enough memory: you tried) to allocate (\d+) bytes")
_UNITS = re.compile(r"(?:[Tt]ried|[Uu]nable) to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)\b")
_SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the memory of a device or of the machine is exhausted."""
    return (
        isinstance(error, MemoryError)
        or is_of_device(error)
        or (isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES))
    )


def is_of_device(error: BaseException) -> bool:
    """Return whether an error reports that a GPU's memory is exhausted."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def find_request(error: BaseException) -> int:
    """Return the bytes of the failed allocation, 0 if the message does not contain them."""
    text = str(error)
    if met := _BYTES.search(text):
        return int(met[1])
    if met := _UNITS.search(text):
        return int(float(met[1]) * _SIZES[met[2]])
    return 0
