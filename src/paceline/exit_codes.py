"""The exit code of a run that was stopped before its end, so that a scheduler can start it again.

Other exit codes: 0 for success, 1 for a finding or a failed rank, 2 for wrong input, 130 for Ctrl-C.
"""

from __future__ import annotations

import signal

STOPPED = 75
"""Stopped, not finished: the same command continues. It is EX_TEMPFAIL of sysexits.h, "try again"."""


def stop_code(signum: int) -> int:
    """Return the exit code of a run that this signal stopped: 130 (the shell's) for Ctrl-C, else 75."""
    return 128 + signal.SIGINT if signum == signal.SIGINT else STOPPED
