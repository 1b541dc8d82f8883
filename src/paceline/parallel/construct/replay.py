"""Repeats recorded operations on real memory, for one tensor at a time.

All operations run on the CPU, on whole tensors. A GPU's generator gives other numbers than the CPU's, and
they differ between models of GPU, so only the CPU gives the same start everywhere.

Memory: storages are freed after their last use, so the peak is about that of the operations that make one
tensor: the tensor itself, and for `x.mul(a).add(b)` twice as much.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.parallel.construct.record import Kind, Record, RecordedOp, StorageWindow
from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.tensors import identify
from paceline.torch_seams.trees import tree_flatten, tree_iter, tree_map_only

CPU = torch.device("cpu")
# Uninitialised memory is filled with one, then with the other, to detect whether the result depends on it. As
# floating-point numbers they are 0 and NaN.
FILLINGS = (0x00, 0xFF)


class UninitialisedError(Exception):
    """The error for a tensor that depends on memory that nothing wrote.

    Args:
        zeroed: the tensor with zeros in that memory.
    """

    def __init__(self, zeroed: Tensor) -> None:
        super().__init__()
        self.zeroed = zeroed


class LostError(Exception):
    """The error for a tensor that depends on one whose values are unknown."""


class ChangedError(Exception):
    """The error for a tensor that depends on one of the caller's that was changed since."""


def replay(record: Record, window: StorageWindow, until: int) -> Tensor:
    """Return a tensor as it was before the operation number `until`, in memory of its own.

    Raises:
        UninitialisedError: it depends on memory that nothing wrote.
        LostError: it depends on a tensor that was already on the meta device when first seen.
        ChangedError: it depends on data that was changed since.
    """
    numbers = record.slice([window.storage], until)
    kinds = {record.ops[number].kind for number in numbers}
    if Kind.LOST in kinds:
        raise LostError
    result = _run(record, numbers, window, FILLINGS[0])
    if Kind.EMPTY in kinds:
        other = _run(record, numbers, window, FILLINGS[1])
        if not have_same_bits(result, other):
            raise UninitialisedError(result)
    return result


def have_same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors hold the same bits, including NaNs."""
    pair = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (left, right)]
    return torch.equal(*pair)


def read_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of a real tensor's storage on the CPU; copied only if they are elsewhere."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run torch without autograd, autocast, default device or function modes; restore generators afterwards.

    One thread is used, because the bits of a matrix product or a factorisation depend on the number of
    threads. (One thread draws random numbers in any case.)
    """
    state = torch.default_generator.get_state()
    dtype = torch.get_default_dtype()
    num_threads = torch.get_num_threads()
    try:
        if num_threads > 1:
            torch.set_num_threads(1)
        with without_functions(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if num_threads > 1:
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.default_generator.set_state(state)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's CPU generators inside the context, and restore them afterwards."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _run(record: Record, numbers: list[int], window: StorageWindow, filling: int) -> Tensor:
    """Return the tensor that a slice makes."""
    last_use = {window.storage: len(record.ops)}
    for number in reversed(numbers):
        for storage in _storages(record.ops[number]):
            last_use.setdefault(storage, number)
    memory: dict[int, torch.UntypedStorage] = {}
    with plain_torch():
        for number in numbers:
            op = record.ops[number]
            _do(record, op, memory, filling)
            for storage in _storages(op):
                if last_use[storage] == number:
                    memory.pop(storage, None)
        result = window.view(_memory_of(record, window.storage, memory))
        if result.untyped_storage().nbytes() == window.num_bytes and not (window.conj or window.neg):
            return result
        alone = torch.empty_strided(window.size, _own_stride(window), dtype=window.dtype)
        return alone.copy_(result)


def _storages(op: RecordedOp) -> set[int]:
    """Return all storages that an operation uses."""
    windows = (leaf.storage for leaf in tree_iter((op.args, op.kwargs)) if isinstance(leaf, StorageWindow))
    return {*windows, *op.writes, *op.reads}


def _own_stride(window: StorageWindow) -> tuple[int, ...]:
    """Return the strides of a copy with memory of its own: the same if the window is dense."""
    if window.is_dense():
        return window.stride
    return tuple(torch.empty_strided(window.size, window.stride, device="meta").clone().stride())


def _memory_of(record: Record, storage: int, memory: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
    """Return a storage's memory; memory that is overwritten before it is read needs no content."""
    if storage not in memory:
        memory[storage] = _allocate(record.num_bytes[storage])
    return memory[storage]


def _allocate(num_bytes: int, filling: int | None = None) -> torch.UntypedStorage:
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=CPU)
    return (memory if filling is None else memory.fill_(filling)).untyped_storage()


def _do(record: Record, op: RecordedOp, memory: dict[int, torch.UntypedStorage], filling: int) -> None:
    """Run one operation."""
    if op.kind is Kind.EMPTY:
        for storage, whole in op.writes.items():
            if whole:
                memory[storage] = _allocate(record.num_bytes[storage], filling)
        return
    if op.kind is Kind.DATA:
        assert op.data is not None
        if not op.data.is_unchanged():
            raise ChangedError
        for storage in op.writes:
            memory[storage] = read_bytes(op.data.tensor).clone().untyped_storage()
        return

    def real(window: StorageWindow) -> Tensor:
        return window.view(_memory_of(record, window.storage, memory))

    assert op.func is not None
    torch.set_default_dtype(op.dtype)
    args, kwargs = tree_map_only(StorageWindow, real, (op.args, op.kwargs))
    if op.random:
        _set_generator(record, op)
    outputs = op.func(*args, **kwargs)
    if op.draw is not None and op.number not in record.states:
        record.states[op.number] = torch.default_generator.get_state()
    if op.makes:
        flat: list[Any] = tree_flatten(outputs)[0]
        for place, window in op.makes:
            memory[window.storage] = _settle(record, flat[place], window, memory)


def _set_generator(record: Record, op: RecordedOp) -> None:
    """Set torch's generator to the state that this operation draws from."""
    if op.draw is None:
        torch.default_generator.manual_seed(record.seeds[op.number])
    elif op.draw.state is not None:
        torch.default_generator.set_state(op.draw.state)
    else:
        assert op.draw.previous is not None
        torch.default_generator.set_state(record.states[op.draw.previous])


def _settle(
    record: Record, output: Tensor, window: StorageWindow, memory: dict[int, torch.UntypedStorage]
) -> torch.UntypedStorage:
    """Return the memory of a new tensor, with the recorded layout.

    The CPU may return other strides than the meta device did, or its input itself instead of a copy.
    """
    assert (tuple(output.size()), output.dtype) == (window.size, window.dtype)
    storage = output.untyped_storage()
    fits = (
        output.stride() == window.stride
        and output.storage_offset() == window.offset
        and (output.is_conj(), output.is_neg()) == (window.conj, window.neg)
        and storage.nbytes() == record.num_bytes[window.storage]
        and all(identify(storage) != identify(other) for other in memory.values())
    )
    if fits:
        return storage
    own = _allocate(record.num_bytes[window.storage])
    window.view(own).copy_(output)
    return own
