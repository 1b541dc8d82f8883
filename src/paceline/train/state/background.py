"""Copies and writes this rank's share while training goes on: one save at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.joint import JointSave
from paceline.checkpoint.writing.state_copy import CopyMemory, CopyThread, Held, StateCopy, measure
from paceline.errors import PacelineError

# A fraction of a processor if training uses all of them, and enough to finish while it goes on.
_NICENESS = 10
# Of the next save beside what this one has: generators, positions of loaders.
_SPARE_BYTES = 1 << 20


class Background:
    """The copying and writing of this rank's shares."""

    def __init__(self, device: torch.device) -> None:
        self.num_copied_bytes = 0
        self._device = device
        self._memory = CopyMemory()
        self._is_reserved = threading.Event()
        self._is_reserved.set()
        self._thread: CopyThread | None = None
        self._state_copy: StateCopy | None = None
        # Once weights were changed behind the trainer's back, they are copied before `save` returns.
        self._copies_at_once = False

    def reserve(self, plans: Sequence[FilePlan]) -> None:
        """Let the thread for copies prepare memory for such files, before the first save needs it."""
        memory, num_bytes = self._memory, measure(plans) + _SPARE_BYTES

        def reserve() -> None:
            try:
                with contextlib.suppress(RuntimeError):  # a save tries again, and says it
                    memory.reserve(num_bytes, self._device)
            finally:
                self._is_reserved.set()  # a save waits for it, whatever happened here

        self._is_reserved.clear()
        self._find_thread().begin(reserve)

    def get_ready(self, plans: Sequence[FilePlan]) -> str:
        """Prepare memory for files; return why that is impossible, or ""."""
        num_bytes = measure(plans)
        self._is_reserved.wait()
        try:
            self._memory.reserve(num_bytes, self._device)
        except RuntimeError:
            return f"there is no memory for {num_bytes:,} bytes"
        return ""

    def begin(
        self,
        save: JointSave,
        plans: Sequence[FilePlan],
        late: frozenset[int],
        held: Sequence[Held],
    ) -> None:
        """Copy the files, the tensors in `late` by a thread; then another one writes them.

        Args:
            late: ids of the tensors that only an optimizer's step changes.
            held: what other ranks hold copies of.
        """

        def end(copied: StateCopy, error: PacelineError | None, digests: list[Digests]) -> None:
            self._copies_at_once |= error is not None
            save.start(copied.plans, digests, error, _NICENESS)

        self._state_copy = StateCopy(self._find_thread(), self._memory, plans, late, held, self._device, end)
        self.num_copied_bytes += self._state_copy.num_bytes
        if self._copies_at_once:
            self._state_copy.wait()

    def wait_for_copy(self) -> None:
        """Return once weights and optimizer state may be written to."""
        if self._state_copy is not None:
            self._state_copy.wait()

    def close(self) -> None:
        """End the thread for copies, and release the memory; the saves have ended."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._state_copy, self._memory = None, CopyMemory()

    def _find_thread(self) -> CopyThread:
        if self._thread is None:
            self._thread = CopyThread()
        return self._thread
