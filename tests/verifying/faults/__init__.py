"""Faults planted into the library by patching it, in ranks of layouts only; the reference stays right.

A fault is a context manager; inside it, the library is wrong. `FAULTS` has them by name; `expected.py` says
where each is planted and what verify must say.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.verifying.faults import context, experts, harmless, replicate, shard, stages, tensor

HARMLESS = harmless.HARMLESS
FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **replicate.FAULTS,
    **tensor.FAULTS,
    **shard.FAULTS,
    **context.FAULTS,
    **experts.FAULTS,
    **stages.FAULTS,
}
