"""Measures a node by itself, to tell a slow node from a slow link."""

from __future__ import annotations

import time
from collections.abc import Callable

RAN = "share of a core"
_SECONDS = 0.3
_SIZE = 384
_BYTES = 32 << 20


def measure_speed() -> dict[str, float]:
    """Return the rates of a matrix product ("matrix product", FLOP/s) and of copying memory ("memory",
    bytes/s), and for which share of the time the process had a core ("share of a core")."""
    import numpy

    left = numpy.full((_SIZE, _SIZE), 0.5, dtype=numpy.float32)
    product = numpy.empty_like(left)
    source = numpy.ones(_BYTES, dtype=numpy.uint8)
    target = numpy.empty_like(source)
    began_s, ran_s = time.perf_counter(), time.process_time()
    rates = {
        "matrix product": 2 * _SIZE**3 * _count_per_s(lambda: numpy.matmul(left, left, out=product)),
        "memory": _BYTES * _count_per_s(lambda: numpy.copyto(target, source)),
    }
    return {**rates, RAN: (time.process_time() - ran_s) / (time.perf_counter() - began_s)}


def _count_per_s(work: Callable[[], object]) -> float:
    work()
    started_s, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - started_s) < _SECONDS:
        work()
        count += 1
    return count / elapsed_s
