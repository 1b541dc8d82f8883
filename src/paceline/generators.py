"""Seeds, reads and preserves the random generators of torch, numpy and Python.

Random numbers do not depend on the rank that computes them. Before every microbatch all generators are
seeded from (seed, step, phase, microbatch), so a forward draws the same numbers on any rank. Dropout uses no
generator; it depends on the sample (`parallel/dropout/replacements.py`). Outside of microbatches the
generators continue their own stream, which is the same on every rank and is saved.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import mtrand


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch on the CPU and on `device`, numpy and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # the legacy generator is what user code draws from unasked


def read_generators(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators, as a tree that a checkpoint can hold."""
    version, words, gauss_next = random.getstate()
    state = {
        "torch": torch.default_generator.get_state(),
        "numpy": _describe_numpy(np.random.get_state(legacy=True)),
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss_next": gauss_next},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


class GeneratorCopier:
    """Copies the states of all generators of the CPU in 3 us; `read_generators` takes 55 us.

    Most of that time is numpy's, whose state is read only if its memory has changed since the last copy.
    """

    def __init__(self) -> None:
        self._owner: Any = None
        self._words: npt.NDArray[np.uint32] | None = None
        self._known: npt.NDArray[np.uint32] | None = None
        self._numpy: Any = None

    def copy(self) -> GeneratorCopies:
        """Return a copy of the states."""
        return GeneratorCopies(torch.default_generator.get_state(), read_python_state(), self._copy_numpy())

    def _copy_numpy(self) -> Any:
        owner = mtrand.get_bit_generator()
        if owner is not self._owner:
            self._owner, self._known = owner, None
            self._words = find_numpy_words(owner)
        # The second number of a pair of normals is cached elsewhere. It comes into being only by a draw.
        if self._known is None or self._words is None or self._numpy[3] or (self._words != self._known).any():
            self._numpy = np.random.get_state(legacy=True)
            self._known = None if self._words is None else self._words.copy()
        return self._numpy


@dataclass(frozen=True)
class GeneratorCopies:
    """Copies of the states of all generators of the CPU."""

    torch_state: torch.Tensor
    python: PythonState
    numpy: Any

    def describe(self) -> dict[str, Any]:
        """Return the same as `read_generators` would have returned."""
        python, words = self.python, self.python.words
        if words is None:
            assert python.slow is not None
            version, numbers, gauss_next = python.slow
            words = np.array(numbers, np.uint32)
        else:
            version, words, gauss_next = random.Random.VERSION, np.roll(words, -1), python.gauss_next
        return {
            "torch": self.torch_state,
            "numpy": _describe_numpy(self.numpy),
            "python": {"version": version, "words": words, "gauss_next": gauss_next},
        }


def _describe_numpy(state: Any) -> dict[str, Any]:
    """Return a state of numpy's legacy generator by name."""
    kind, keys, position, has_gauss, gauss = state
    return {"kind": kind, "keys": keys, "position": position, "has_gauss": has_gauss, "gauss": gauss}


def find_numpy_words(owner: Any) -> npt.NDArray[np.uint32] | None:
    """Return a view of the memory of numpy's legacy generator: 624 words, then the index of the next one.

    `None` if memory and `np.random.get_state` differ, as with another kind of generator.

    Args:
        owner: the generator, which the caller keeps as long as the view.
    """
    if type(owner) is not np.random.MT19937:
        return None
    memory = (ctypes.c_uint32 * _WORDS).from_address(owner.ctypes.state_address)
    words: npt.NDArray[np.uint32] = np.ctypeslib.as_array(memory)
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return words if words.tolist() == [*np.asarray(keys).tolist(), position] else None


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state of `read_generators`; a CUDA generator's state is used only on CUDA."""
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
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore all generators at exit, whatever is seeded or drawn inside.

    numpy's generator is swapped for another one: reading and setting its state takes 90 us, the swap 0.4 us.
    The swap loses only the second number of a pair of normals that numpy had cached.

    Args:
        device: if it is a GPU, its generator is preserved too.
    """
    torch_state = torch.default_generator.get_state()
    python_state = read_python_state()
    cuda_state = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    numpy_generator = mtrand.get_bit_generator()
    spare = _spare.pop() if _spare else np.random.MT19937(0)
    mtrand.set_bit_generator(spare)
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpy_generator)
        _spare.append(spare)
        torch.default_generator.set_state(torch_state)
        write_python_state(python_state)
        if cuda_state is not None and device is not None:
            torch.cuda.set_rng_state(cuda_state, device)


# ---- Python's generator, read in 1 us: `random.getstate` builds 625 integers, which takes 50 us


@dataclass(frozen=True)
class PythonState:
    """The state of Python's `random`: copied memory if its address is known, else `getstate`'s result."""

    words: npt.NDArray[np.uint32] | None
    gauss_next: float | None
    slow: tuple[Any, ...] | None


def find_python_words() -> npt.NDArray[np.uint32] | None:
    """Return a view of the generator's memory in CPython: the index of the next word, then 624 words.

    `None` if memory and `random.getstate` differ, as in another implementation of Python.
    """
    generator: random.Random | None = getattr(random, "_inst", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if _random.Random.__basicsize__ < object.__basicsize__ + 4 * _WORDS:
        return None
    memory = (ctypes.c_uint32 * _WORDS).from_address(id(generator) + object.__basicsize__)
    words: npt.NDArray[np.uint32] = np.ctypeslib.as_array(memory)
    _, (*state, index), _ = random.getstate()
    return words if words.tolist() == [index, *state] else None


_WORDS = 625
_inst: Any = getattr(random, "_inst", None)
_python_words = find_python_words()


def read_python_state() -> PythonState:
    """Return the state of Python's `random`."""
    if _python_words is None:
        return PythonState(None, None, random.getstate())
    return PythonState(_python_words.copy(), _inst.gauss_next, None)


def write_python_state(state: PythonState) -> None:
    """Restore a state of `read_python_state`."""
    if _python_words is None or state.words is None:
        assert state.slow is not None
        random.setstate(state.slow)
        return
    _python_words[:] = state.words
    _inst.gauss_next = state.gauss_next


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
