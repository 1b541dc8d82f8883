"""Starts a rank's writer (`writer.py`), and exchanges messages with it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import asdict

from paceline.checkpoint.companion import CompanionProcess
from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.writing.joint import Order, Outcome
from paceline.errors import PacelineError

# Begins the command line after the program, so that launchers know a writer and let it finish
# (`launching/processes/family.py`).
MARKER = "paceline.checkpoint.writing.writer"
# Which module's `main` is the writer. Tests put faults into it.
PROGRAM = "paceline.checkpoint.writing.writer"


class WriterProcess(CompanionProcess):
    """A rank's writer, from the rank's side.

    Args:
        memory: descriptor of the memory that both share.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, memory: int) -> None:
        super().__init__(MARKER, PROGRAM, [memory])

    def begin(self, order: Order) -> None:
        """Begin a save."""
        self._send({"do": "begin", "order": asdict(order)})

    def await_begin(self) -> None:
        """Return once the writer has begun the save, or cannot; call it once per save, before `end_copy`."""
        with suppress(EOFError):  # `read_outcome` reports it
            self._read(None)

    def end_copy(self, error: PacelineError | None, digests: list[Digests]) -> None:
        """Hand over the copy and digests of what other ranks hold too, or end the save by an error."""
        if error is None:
            self._send({"do": "write", "digests": digests})
        else:
            self._send({"do": "abandon", "error": [error.code, error.saw, error.rule, error.fix]})

    def read_outcome(self, timeout_s: float | None) -> tuple[Outcome, float] | None:
        """Return the outcome of the save and how long the writer took, or `None` if it is not known in time.

        Raises:
            EOFError: the writer has ended.
        """
        table = self._read(timeout_s)
        return None if table is None else (Outcome.parse(table), float(table["seconds"]))

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the writer to finish. If that takes longer, it finishes on its own."""
        self._link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # else Popen warns about it when it is collected
