"""Writes TensorBoard's event files: one event per step, in the caller's thread.

`tensorboardX.SummaryWriter` sends every number through a queue to a thread. With seven numbers that takes
1.5 ms of CPU per step and delays the step, because the thread competes for the interpreter lock. Here all
numbers of a step are one event, which the caller writes in less than 0.1 ms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_FLUSH_S = 10.0


class EventFile:
    """One start's events in a folder; TensorBoard shows them together with those of earlier starts.

    Args:
        folder: created if it is missing.
        purge_step: TensorBoard hides events of earlier starts from this step on.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self._last_flush_s = time.monotonic()
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=purge_step, session_log=start, wall_time=time.time()))

    def write(self, step: int, values: Mapping[str, float], wall_s: float) -> None:
        """Append numbers by name, with the time `wall_s` (seconds since 1970)."""
        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=named), wall_time=wall_s))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write(self, event: Event) -> None:
        self._writer.write_event(event)
        now_s = time.monotonic()
        if now_s - self._last_flush_s > _FLUSH_S:
            self._writer.flush()
            self._last_flush_s = now_s
