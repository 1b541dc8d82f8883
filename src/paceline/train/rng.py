"""Random numbers that depend on what is computed, not on who computes it.

Before every microbatch all generators are seeded from (seed, step, phase, microbatch): what a forward
draws is then the same on whichever rank it runs. Dropout uses no generator and depends on the sample
instead of the microbatch (`parallel/dropout/replacements.py`). Outside of microbatches the generators go on
with their own stream, which is the same on every rank and part of checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds torch on the CPU and on `device`, numpy and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # the legacy generator is what user code draws from unasked


def read_generators(device: torch.device) -> dict[str, Any]:
    """The state of all generators, as a tree that a checkpoint can hold."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "numpy": {
            "kind": kind,
            "keys": keys,
            "position": position,
            "has_gauss": has_gauss,
            "gauss": gauss,
        },
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss_next": gauss_next},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what `read_generators` gave; a CUDA state is ignored elsewhere and the other way round."""
    torch.default_generator.set_state(state["torch"].cpu())
    numpy = state["numpy"]
    np.random.set_state(
        (numpy["kind"], np.asarray(numpy["keys"]), numpy["position"], numpy["has_gauss"], numpy["gauss"])
    )
    python = state["python"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss_next"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


# Generators for numpy inside of `preserved_generators`, one per depth of nesting.
_spare: list[np.random.MT19937] = []


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Leaves all generators as they were found, whatever is seeded or drawn inside.

    numpy's is swapped for another one, as reading and setting its state would be 80 of 100 us. All that
    the swap loses is the second half of a pair of normals that numpy had ready.
    """
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy_generator = mtrand.get_bit_generator()
    spare = _spare.pop() if _spare else np.random.MT19937(0)
    mtrand.set_bit_generator(spare)
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpy_generator)
        _spare.append(spare)
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
