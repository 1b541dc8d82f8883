"""The number of threads of numpy's OpenBLAS."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""The variable that it reads when it is loaded."""


def set_openblas_threads() -> None:
    """Set OpenBLAS's threads to the environment's number, as it would have done when loaded."""
    wanted = os.environ.get(OPENBLAS_THREADS) or os.environ.get("OMP_NUM_THREADS") or ""
    num_threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads",
        ):
            with suppress(AttributeError):
                getattr(library, name)(num_threads)
                break
