"""Arguments of `UserSubject` for two steps in fp64, as tests and benchmarks of `verify` take them."""

from __future__ import annotations

from typing import Any

TWO_STEPS: dict[str, Any] = {
    "num_steps": 2,
    "dtype": "fp64",
    "reduction": "fast",
    "clip_norm": 1.0,
    "microbatch_size": 2,
    "global_batch_size": None,
    "seed": 0,
}
