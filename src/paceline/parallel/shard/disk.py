"""Offloads to disk: keeps a rank's shards and optimizer state in files that are mapped into memory.

The system reads a page when it is accessed and may drop it again when memory is short. Only the gradients and
the few gathered blocks must fit into memory. Every tensor has a file of its own, which is unlinked once it is
mapped: the disk space is free again when the process ends, however it ends.

An optimizer's own step would first make all of its state in memory, and temporary tensors for all parameters
at once. So it steps one parameter at a time, and new state moves to disk before the next one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.errors import PacelineError
from paceline.parallel.shard.setup import Unit
from paceline.torch_seams.fsdp import list_records, move_shard, read_local, set_local

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_MOUNTS = Path("/proc/self/mounts")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# <sys/mman.h>, on Linux.
_MS_SYNC = 4
_MADV_DONTNEED = 4
# <malloc.h> of glibc.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 20


class Disk:
    """The tensors of a rank that are in files.

    Args:
        folder: the folder of the files; `None` for the system's temporary folder.

    Attributes:
        num_bytes: of all tensors that were moved to disk.

    Raises:
        PacelineError: PL444 for a folder in memory, PL445 for one that cannot be used.
    """

    def __init__(self, folder: str | None) -> None:
        self.num_bytes = 0
        self._folder = Path(folder or tempfile.gettempdir())
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK | os.X_OK):
            raise _folder_error(self._folder, "is not a folder that can be written to")
        kind = _kind_of_file_system(self._folder)
        if kind in _IN_MEMORY:
            raise PacelineError(
                "PL444",
                saw=f"shard.offload_folder={self._folder} is of type {kind}.",
                rule="Such a folder is itself memory, so offload to it frees nothing.",
                fix="Set shard.offload_folder to a folder on a disk.",
            )
        # By address, with a weak reference: the system may give the address of a freed mapping to the heap,
        # and dropping those pages would destroy it.
        self._known: dict[int, StorageWeakRef] = {}
        _return_freed_memory()

    @torch.no_grad()
    def move(self, tensor: Tensor) -> Tensor:
        """Return the same numbers in a tensor that is mapped from a file."""
        if not tensor.numel() or self.holds(tensor):
            return tensor
        num_bytes = tensor.numel() * tensor.element_size()
        handle, path = tempfile.mkstemp(prefix="paceline-offload-", dir=self._folder)
        try:
            # Reserved now: a full disk raises an error here, but SIGBUS at the first access.
            os.posix_fallocate(handle, 0, num_bytes)
            moved = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError as error:
            raise _folder_error(self._folder, f"has no space for {num_bytes} bytes ({error})") from error
        finally:
            os.close(handle)
            os.unlink(path)
        self.num_bytes += num_bytes
        storage = moved.untyped_storage()
        self._known[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        moved = moved.view(tensor.shape).copy_(tensor)
        self.write_back(moved)
        return moved

    def write_back(self, tensor: Tensor) -> None:
        """Write a tensor's changes to its file and free its memory.

        The system would do both by itself, but too late under a limit: a control group that is full of
        unwritten pages kills its processes.
        """
        if _LIBC is not None and self.holds(tensor):
            storage = tensor.untyped_storage()
            start, length = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
            if _LIBC.msync(start, length, _MS_SYNC) == 0:
                _LIBC.madvise(start, length, _MADV_DONTNEED)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on disk already."""
        address = tensor.untyped_storage().data_ptr()
        known = self._known.get(address)
        if known is not None and known.expired():  # type: ignore[no-untyped-call]
            del self._known[address]
            return False
        return known is not None

    @torch.no_grad()
    def move_parameters(self, units: list[Unit]) -> None:
        """Move the shards of all parameters, which must not be on the meta device any more."""
        for unit in units:
            for record in list_records(unit.module):
                move_shard(record, self.move)

    def move_state(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        """Move an optimizer's state of one parameter, except counters."""
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, DTensor):
                set_local(value, self.move(read_local(value)))
                self.write_back(read_local(value))
            elif isinstance(value, Tensor) and value.dim():
                state[key] = self.move(value)
                self.write_back(state[key])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step one parameter at a time, and move each one's state after it."""
        groups = optimizer.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    alone = {**group, "params": [parameter]}
                    optimizer.param_groups = [alone]
                    optimizer.step()
                    _check_group(optimizer, group, alone)
                    self.move_state(optimizer, parameter)
                    self.write_back(_local(parameter))
        finally:
            optimizer.param_groups = groups


def _check_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], stepped: dict[str, Any]) -> None:
    """Raise PL466 for an optimizer that counts steps in its groups: it would count parameters."""
    for key, value in stepped.items():
        if key != "params" and repr(value) != repr(group.get(key)):
            raise PacelineError(
                "PL466",
                saw=f"optimizer={type(optimizer).__name__}: its step() changes {key!r} of its group.",
                rule='With offload = "disk", step() is called for one parameter at a time.',
                fix='Use offload = "cpu" or "none", or an optimizer that keeps such numbers in its state.',
            )


def _return_freed_memory() -> None:
    """Make glibc return large tensors to the system when they are freed.

    By default it keeps more and more of them once the first one was freed: with 40 blocks of 4 MiB on 2 ranks
    a forward alone left 320 MiB behind in every process, although at most two blocks were gathered at once.
    """
    if _LIBC is not None and hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        _LIBC.malloc_trim(0)


def _local(tensor: Tensor) -> Tensor:
    return read_local(tensor) if isinstance(tensor, DTensor) else tensor


def _kind_of_file_system(folder: Path) -> str:
    """Return the type of a folder's file system as in /proc/mounts; "" if it is not known."""
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    place = str(folder.resolve())
    above = [(len(at), kind) for at, kind in mounts if (place + "/").startswith(at.rstrip("/") + "/")]
    return max(above, default=(0, ""))[1]


def _folder_error(folder: Path, why: str) -> PacelineError:
    return PacelineError(
        "PL445",
        saw=f"shard.offload_folder={folder} {why}.",
        rule='offload = "disk" keeps each rank\'s parameters and optimizer state in files there.',
        fix="Set shard.offload_folder to an existing folder with write permission and enough space.",
    )
