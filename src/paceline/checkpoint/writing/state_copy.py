"""Copies what this rank writes into memory from which a thread writes it, while training goes on.

What may change at any moment (buffers, which a forward changes; tensors of the user's objects) is
copied at once. Tensors that only an optimizer's step changes are copied by a thread during the next
forward and backward. `StateCopy.wait` must be called before anything may write to them: without it, the copy
would hold numbers of two steps. The thread also reads what other ranks hold copies of (`same_copies.py`).

The memory's pages are touched once, because a copy into fresh pages takes fifteen times as long. On CUDA it
is pinned. What is copied at once is then ordered before the next forward, and the rest runs on a stream of
its own; the host waits for neither.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.joint import broken_error
from paceline.errors import PacelineError
from paceline.torch_seams.tensors import read_version

# Every type begins at a multiple of its size.
_ALIGNED = 64


class Held(Protocol):
    """Tensors that other ranks hold copies of."""

    def read(self) -> bool:
        """Read the tensors; return `False` if one of them was written to meanwhile."""

    def describe(self) -> list[Digests]:
        """Return digests of the tensors."""


class CopyMemory:
    """Memory for the copies of this rank's tensors, kept between saves."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._tensor.numel()

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Make the memory large enough and touch its pages. Nothing in it is kept if it grows.

        Raises:
            RuntimeError: there is not enough memory.
        """
        if num_bytes > self.num_bytes:
            self._tensor = torch.empty(0, dtype=torch.uint8)
            pins = device.type == "cuda"
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins).zero_()

    def view(self, start: int, like: Tensor) -> Tensor:
        """Return the memory from a byte on as a tensor of another one's type and shape."""
        found = self._tensor[start : start + like.numel() * like.element_size()]
        return found.view(like.dtype).view(like.shape)


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
        late: ids of the tensors that only an optimizer's step changes.
        held: what other ranks hold copies of, to be read by the thread too.
        on_end: called by the thread once the copy is complete, with this object, `None` or why it failed, and
            the digests of what is held.

    Attributes:
        plans: the same files, of the copies.
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
        on_end: Callable[[StateCopy, PacelineError | None, list[Digests]], None],
    ) -> None:
        self.num_bytes = sum(plan.num_bytes for plan in plans)
        self.plans: list[FilePlan] = []
        self._late: list[tuple[Tensor, Tensor, int]] = []
        start = 0
        for plan in plans:
            pieces: list[bytes | Tensor] = []
            for piece in plan.pieces:
                if isinstance(piece, bytes):
                    pieces.append(piece)
                    continue
                pieces.append(copy := memory.view(start, piece))
                start += _measure(piece)
                if id(piece) in late:
                    self._late.append((copy, piece.detach(), read_version(piece)))
                else:
                    self._copy(copy, piece, non_blocking=device.type == "cuda")
            self.plans.append(FilePlan(plan.name, tuple(pieces)))
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
        thread.begin(self._run)

    def wait(self) -> None:
        """Return once the tensors may be written to: the copy is complete, or ordered before what follows."""
        self._issued.wait()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def _run(self) -> None:
        error: PacelineError | None = None
        try:
            # Without a stream, torch would start CUDA on a machine that has it.
            on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with torch.no_grad(), on_stream:
                error = self._copy_late()
            if self._event is not None:
                self._event.record(self._stream)
        except Exception as failed:  # reported with the save; training goes on
            error = broken_error(failed)
        finally:
            self._issued.set()
        digests: list[Digests] = []
        if error is None:
            if self._event is not None:
                self._event.synchronize()
            digests = [each for held in self._held for each in held.describe()]
        self._late.clear()  # from here on the tensors may be released
        self._on_end(self, error, digests)

    def _copy_late(self) -> PacelineError | None:
        """Copy the tensors and read what is held; return an error if one was written to meanwhile."""
        for copy, tensor, version in self._late:
            self._copy(copy, tensor, non_blocking=self._stream is not None)
            if read_version(tensor) != version:
                return _torn_error()
        return None if all(held.read() for held in self._held) else _torn_error()

    @torch.no_grad()
    def _copy(self, copy: Tensor, tensor: Tensor, *, non_blocking: bool = False) -> None:
        copy.copy_(tensor, non_blocking=non_blocking)


def measure(plans: Sequence[FilePlan]) -> int:
    """Return how much memory the tensors of files take."""
    return sum(_measure(piece) for plan in plans for piece in plan.pieces if isinstance(piece, Tensor))


def _measure(tensor: Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes + -num_bytes % _ALIGNED


def _torn_error() -> PacelineError:
    return PacelineError(
        "PL543",
        saw="Weights were changed while they were copied for a checkpoint, by something other than the "
        "optimizer's step (which waits for the copy).",
        rule="A checkpoint holds the numbers of one step. This save is given up; the next ones copy the "
        "weights before `save` returns.",
        fix="Change weights before `save`, or use save(wait=True), or checkpoint.asynchronous = false.",
    )
