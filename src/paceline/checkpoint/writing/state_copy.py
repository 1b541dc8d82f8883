"""Copies what this rank writes into memory that its writer reads, while training goes on.

Headers and what may change at any moment (buffers, which a forward changes; tensors of the user's objects)
are copied at once. Tensors that only an optimizer's step changes are copied by a thread during the next
forward and backward. `StateCopy.wait` must be called before anything may write to them: without it, the copy
would hold numbers of two steps. The thread also reads what other ranks hold copies of (`same_copies.py`).

The memory comes from `memfd_create`: it has no name, does not count against the size of /dev/shm, and is gone
with the last process that has it open. Its pages are touched once, because a copy into fresh pages takes
fifteen times as long. On CUDA it is pinned, and the copies run on a stream of their own.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.tensors import FilePlan, piece_bytes
from paceline.errors import PacelineError
from paceline.torch_seams.tensors import read_version

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
# Headers and counters grow a little over a run; growing the memory for each would touch all of it again.
_SLACK = 1 / 64
_SLACK_BYTES = 1 << 20

# Name of a file, its first byte in the memory and its number of bytes.
Place = tuple[str, int, int]


class Held(Protocol):
    """Tensors that other ranks hold copies of."""

    def read(self) -> bool:
        """Read the tensors; return `False` if one of them was written to meanwhile."""

    def describe(self) -> list[Digests]:
        """Return digests of the tensors."""


class CopyMemory:
    """Memory that this rank shares with its writer.

    Attributes:
        fd: its descriptor.
        num_bytes: its size.

    Raises:
        OSError: the system has no `memfd_create`.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self.fd = os.memfd_create("paceline-save", os.MFD_CLOEXEC)
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._pinned = 0

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Make the memory large enough and touch its pages. Nothing in it is kept if it grows.

        Raises:
            OSError: there is not enough memory.
        """
        if num_bytes <= self.num_bytes:
            return
        wanted = int(num_bytes * (1 + _SLACK)) + _SLACK_BYTES
        wanted += -wanted % _PAGE_BYTES
        self._unmap()
        os.posix_fallocate(self.fd, 0, wanted)  # fails where writing to the pages would kill the process
        self._map = mmap.mmap(self.fd, wanted)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensor.zero_()  # the pages exist, and this process now has them in its table
        if device.type == "cuda":
            self._pin(device)
        self.num_bytes = wanted

    def view(self, start: int, like: Tensor) -> Tensor:
        """Return the memory from a byte on as a tensor of another one's type and shape."""
        found = self._tensor[start : start + like.numel() * like.element_size()]
        return found.view(like.dtype).view(like.shape)

    def put(self, start: int, data: bytes) -> None:
        """Copy bytes into the memory."""
        assert self._map is not None
        self._map[start : start + len(data)] = data

    def close(self) -> None:
        """Release it; the writer keeps what it has open."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _pin(self, device: torch.device) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self._tensor.data_ptr()
        if int(runtime.cudaHostRegister(address, self._tensor.numel(), 0)) == 0:
            self._pinned = address
            return
        log.warning(
            "memory for asynchronous saves cannot be locked (ulimit -l): copies from the GPU are slower"
        )
        with suppress(RuntimeError):  # the next kernel's check raises the error that is left, and clears it
            torch.zeros((), device=device)

    def _unmap(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._pinned)
            self._pinned = 0
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        if self._map is not None:
            with suppress(BufferError):  # a tensor that somebody still has; its memory goes with it
                self._map.close()
            self._map = None


class CopyThread:
    """A thread for copies, one after the other.

    It lives as long as its owner: `Thread.start` waits until the new thread has run, and on busy cores that
    would be most of what a save makes training wait for.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="paceline-copy", daemon=True).start()

    def begin(self, task: Callable[[], None]) -> None:
        """Call `task` in the thread."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after its tasks, without waiting for it."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # reported as any thread's; the next copy needs this one
                hook_args = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(hook_args))
            del task  # with the tensors that it refers to


class StateCopy:
    """A copy of one rank's share of a checkpoint, taken while training goes on.

    Args:
        thread: copies what only an optimizer's step changes.
        memory: large enough (`measure`).
        plans: the files of this rank.
        late: ids of the tensors that only an optimizer's step changes.
        held: what other ranks hold copies of, to be read by the thread too.
        device: of the model.
        on_end: called by the thread once the copy is complete, with `None`, or with why it failed, and the
            digests of what is held.

    Attributes:
        num_bytes: that were copied.
    """

    def __init__(
        self,
        thread: CopyThread,
        memory: CopyMemory,
        plans: Sequence[FilePlan],
        late: Collection[int],
        held: Sequence[Held],
        device: torch.device,
        on_end: Callable[[PacelineError | None, list[Digests]], None],
    ) -> None:
        self.num_bytes = sum(plan.num_bytes for plan in plans)
        self._memory = memory
        self._late: list[tuple[int, Tensor, int]] = []
        for plan, (_, start, _) in zip(plans, lay_out(plans), strict=True):
            for piece in plan.pieces:
                if isinstance(piece, bytes):
                    memory.put(start, piece)
                elif id(piece) in late:
                    self._late.append((start, piece.detach(), read_version(piece)))
                else:
                    self._copy(start, piece)
                start += piece_bytes(piece)
        self._held = held
        self._device = device
        self._on_end = on_end
        self._issued = threading.Event()
        self._stream: Any = None
        self._event: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ended = threading.Event()
        thread.begin(self._run)

    def wait(self) -> None:
        """Return once the tensors may be written to: the copy is complete, or ordered before what follows."""
        self._issued.wait()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def join(self, timeout_s: float | None = None) -> bool:
        """Return true once `on_end` was called, or false if that takes longer."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._copy_and_tell()
        finally:
            self._ended.set()

    def _copy_and_tell(self) -> None:
        error: PacelineError | None = None
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                error = self._copy_late()
            if self._event is not None:
                self._event.record(self._stream)
        except Exception as failed:  # reported with the save; training goes on
            error = _broken_error(failed)
        finally:
            self._issued.set()
        digests: list[Digests] = []
        if error is None:
            if self._event is not None:
                self._event.synchronize()
            digests = [each for held in self._held for each in held.describe()]
        self._on_end(error, digests)

    def _copy_late(self) -> PacelineError | None:
        """Copy the tensors and read what is held; return an error if one was written to meanwhile."""
        for start, tensor, version in self._late:
            self._copy(start, tensor, non_blocking=self._stream is not None)
            if read_version(tensor) != version:
                return _torn_error()
        return None if all(held.read() for held in self._held) else _torn_error()

    @torch.no_grad()
    def _copy(self, start: int, tensor: Tensor, *, non_blocking: bool = False) -> None:
        self._memory.view(start, tensor).copy_(tensor, non_blocking=non_blocking)


def lay_out(plans: Sequence[FilePlan]) -> list[Place]:
    """Return the places of files in the memory."""
    places = []
    end = 0
    for plan in plans:
        start = end + -end % _PAGE_BYTES
        end = start + plan.num_bytes
        places.append((plan.name, start, plan.num_bytes))
    return places


def measure(plans: Sequence[FilePlan]) -> int:
    """Return how much memory the files take."""
    return max((start + num_bytes for _, start, num_bytes in lay_out(plans)), default=0)


def _torn_error() -> PacelineError:
    return PacelineError(
        "PL543",
        saw="Weights were changed while they were copied for a checkpoint, by something other than the "
        "optimizer's step (which waits for the copy).",
        rule="A checkpoint holds the numbers of one step. This save is given up; the next ones copy the "
        "weights before `save` returns.",
        fix="Change weights before `save`, or use save(wait=True), or checkpoint.asynchronous = false.",
    )


def _broken_error(error: Exception) -> PacelineError:
    return PacelineError(
        "PL544",
        saw=f"Copying the state for a checkpoint failed ({type(error).__name__}: {error}).",
        rule="A checkpoint is committed once the shares of all ranks are copied; earlier checkpoints are "
        "unchanged.",
        fix="If memory ran out, use checkpoint.asynchronous = false.",
    )
