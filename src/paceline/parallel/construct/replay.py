"""Does recorded operations again, on real memory, for one tensor at a time.

All of it runs on the CPU, and by whole tensors: a GPU's generator gives other numbers than the CPU's, and
other numbers on another model of GPU, so the same start everywhere is only to be had here.

Memory: storages are dropped after their last use, so about as much is held as the operations that make one
tensor hold at once: that tensor, and for `x.mul(a).add(b)` twice as much.
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
# Uninitialised memory is filled with one, then with the other, to see whether the result depends on it.
# As floating-point numbers they are 0 and NaN.
FILLINGS = (0x00, 0xFF)


class UninitialisedError(Exception):
    """What was asked for depends on memory that nobody wrote.

    Args:
        zeroed: the same with that memory taken as zeros.
    """

    def __init__(self, zeroed: Tensor) -> None:
        super().__init__()
        self.zeroed = zeroed


class LostError(Exception):
    """What was asked for depends on a tensor whose values are unknown."""


class ChangedError(Exception):
    """What was asked for depends on a tensor of the caller's that was changed since."""


def replay(record: Record, window: StorageWindow, until: int) -> Tensor:
    """A tensor as it was before the operation number `until`, in memory of its own.

    Raises:
        UninitialisedError: it depends on memory that nobody wrote.
        LostError: it depends on a tensor that was on the meta device when it was met.
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
    """Whether two tensors hold the same bits, NaNs too."""
    pair = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (left, right)]
    return torch.equal(*pair)


def read_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a real tensor's storage, on the CPU; not a copy where they are there already."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Nothing around the call has a say: no autograd, autocast or default device; generators are put back.

    One thread, as the bits of a matrix product or a factorisation depend on their number. (Random numbers are
    drawn by one in any case.)
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
    """Seeds torch's, numpy's and Python's generators of the CPU for what is inside, and puts them back."""
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
    """The tensor that a slice makes."""
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
    """All storages that an operation touches."""
    windows = (leaf.storage for leaf in tree_iter((op.args, op.kwargs)) if isinstance(leaf, StorageWindow))
    return {*windows, *op.writes, *op.reads}


def _own_stride(window: StorageWindow) -> tuple[int, ...]:
    """The strides of a copy with memory of its own: the same where nothing is left out or seen twice."""
    if window.is_dense():
        return window.stride
    return tuple(torch.empty_strided(window.size, window.stride, device="meta").clone().stride())


def _memory_of(record: Record, storage: int, memory: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
    """A storage's memory; what will be written over before it is read needs no content."""
    if storage not in memory:
        memory[storage] = _allocate(record.num_bytes[storage])
    return memory[storage]


def _allocate(num_bytes: int, filling: int | None = None) -> torch.UntypedStorage:
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=CPU)
    return (memory if filling is None else memory.fill_(filling)).untyped_storage()


def _do(record: Record, op: RecordedOp, memory: dict[int, torch.UntypedStorage], filling: int) -> None:
    """Does one operation."""
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
    """Brings torch's generator to where this operation draws from."""
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
    """The memory of a new tensor, laid out as it was recorded.

    The CPU may give other strides than the meta device did, or its input itself where that gave a copy.
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
