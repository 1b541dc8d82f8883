"""This rank's writer with the memory that both share: one save at a time, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.joint import STILL_S, Order, Outcome, standing_still_error
from paceline.checkpoint.writing.state_copy import CopyMemory, CopyThread, Held, StateCopy, lay_out, measure
from paceline.checkpoint.writing.writer_process import StandsStillError, WriterProcess
from paceline.errors import PacelineError

log = logging.getLogger(__name__)


class Background:
    """The copying and writing of this rank's shares.

    Args:
        device: of the model.

    Attributes:
        save_s: seconds from the begin of the last copy to the outcome of its save.
        num_copied_bytes: of all saves.
        still_s: returns how long the writer may be silent before its save counts as failed.
    """

    def __init__(self, device: torch.device) -> None:
        self.save_s: float | None = None
        self.num_copied_bytes = 0
        self.still_s: Callable[[], float] = lambda: STILL_S
        self._device = device
        self._memory: CopyMemory | None = None
        self._writer: WriterProcess | None = None
        self._thread: CopyThread | None = None
        self._state_copy: StateCopy | None = None
        self._reserving: threading.Thread | None = None
        # Once weights were changed behind the trainer's back, they are copied before `save` returns.
        self._copies_at_once = False
        self._begin_s = self._copy_s = 0.0

    @property
    def memory_bytes(self) -> int:
        """Size of the memory."""
        return 0 if self._memory is None else self._memory.num_bytes

    def start(self) -> str:
        """Start the writer, unless it runs; return why that is impossible, or ""."""
        try:
            if self._memory is None:
                self._memory = CopyMemory()
            if self._writer is None:
                self._writer = WriterProcess(self._memory.fd)
            if self._thread is None:
                self._thread = CopyThread()
        except OSError as error:
            return str(error)
        return ""

    def reserve_soon(self, num_bytes: int) -> None:
        """Prepare memory for the files of a save in a thread, so that the first save does not wait."""
        self._finish_reserving()
        memory = self._memory
        if memory is None:
            return

        def reserve() -> None:
            with suppress(OSError):  # the save says so, and what follows from it
                memory.reserve(num_bytes, self._device)

        self._reserving = threading.Thread(target=reserve, name="paceline-reserve", daemon=True)
        self._reserving.start()

    def get_ready(self, plans: Sequence[FilePlan]) -> str:
        """Prepare writer and memory for files; return why that is impossible, or ""."""
        reason = self.start()
        if reason:
            return reason
        assert self._memory is not None
        self._finish_reserving()
        num_bytes = measure(plans)
        try:
            self._memory.reserve(num_bytes, self._device)
        except OSError as error:
            return f"{num_bytes:,} bytes for the copy: {error.strerror}"
        return ""

    def begin(
        self, order: Order, plans: Sequence[FilePlan], late: frozenset[int], held: Sequence[Held]
    ) -> None:
        """Copy the files, the tensors in `late` by a thread; then the writer goes on.

        Args:
            order: without files.
            plans: of the files.
            late: ids of the tensors that only an optimizer's step changes.
            held: what other ranks hold copies of.
        """
        memory, writer, thread = self._memory, self._writer, self._thread
        assert memory is not None
        assert writer is not None
        assert thread is not None
        self._begin_s = time.monotonic()

        def end(error: PacelineError | None, digests: list[Digests]) -> None:
            self._copy_s = time.monotonic() - self._begin_s
            self._copies_at_once |= error is not None
            # Else the writer could commit after a new start has looked for writers and seen none.
            writer.await_begin(self.still_s)
            writer.end_copy(error, digests)

        writer.begin(replace(order, files=lay_out(plans)))
        self._state_copy = StateCopy(thread, memory, plans, late, held, self._device, end)
        self.num_copied_bytes += self._state_copy.num_bytes
        if self._copies_at_once:
            self._state_copy.wait()

    def wait_for_copy(self) -> None:
        """Return once weights and optimizer state may be written to."""
        if self._state_copy is not None:
            self._state_copy.wait()

    def read_outcome(self, timeout_s: float | None = None) -> Outcome | None:
        """Return the outcome of the save under way, or `None` if it is not known in time."""
        begin_s = time.monotonic()
        writer = self._writer
        assert writer is not None
        try:
            if self._state_copy is not None and not self._state_copy.join(timeout_s):
                return None
            left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin_s))
            found = writer.read_outcome(left_s, self.still_s)
        except EOFError as error:
            outcome = Outcome(error=_ended_error(writer.pid, str(error)))
            writer.close()
            self._writer = None  # the next save starts another one
            return outcome
        except StandsStillError:
            who, silent_s = (
                f"The writer of this rank (process {writer.pid})",
                time.monotonic() - writer.heard_s,
            )
            writer.kill()
            self._writer = None
            return Outcome(error=standing_still_error(who, writer.doing, silent_s))
        if found is None:
            return None
        outcome, write_s = found
        self.save_s = self._copy_s + write_s
        self._state_copy = None
        return outcome

    def close(self) -> None:
        """Wait for the copy, and let the writer end, which outlives this process if it needs longer."""
        self._finish_reserving()
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _finish_reserving(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None


def _ended_error(pid: int, how: str) -> PacelineError:
    return PacelineError(
        "PL540",
        saw=f"The writer of this rank (process {pid}) ended during a save ({how}).",
        rule="A checkpoint is committed once the shares of all ranks are on the disk; earlier checkpoints "
        "are unchanged.",
        fix="Look for the reason: a lack of memory, or a kill. The next save starts a new writer.",
    )
