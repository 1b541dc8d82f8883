"""The sink `tensorboard`: event files in the run's folder, with one event per step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from paceline.sinks.sink import Sink, SinkRun

# Of the numbers that every run has, those with a curve. All values of the user's own have one.
_LEFT_OUT = {"epoch", "samples", "tokens", "flops_per_s", "memory_bytes", "save_stall_s", "save_s", "step_s"}


class TensorBoardSink(Sink):
    """The curves `train/...` and `valid/...`; events after the step that a start resumes from are hidden.

    `tensorboardX.SummaryWriter` makes an event per number, and sends it to a thread of its own: 1.5 ms of CPU
    for the seven numbers of a step. One event for all of them takes less than 0.1 ms.
    """

    name = "tensorboard"

    def begin(self, start: SinkRun) -> None:
        folder = start.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        log = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(step=start.first_step + 1, session_log=log, wall_time=time.time()))

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        known = {key: x for key, x in values.items() if key not in _LEFT_OUT and math.isfinite(x)}
        self._write(number, "train", known, wall_s)

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._write(number, "valid", values, wall_s)

    def flush(self) -> None:
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()

    def _write(self, number: int, kind: str, values: Mapping[str, float], wall_s: float) -> None:
        named = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        self._writer.write_event(Event(step=number, summary=Summary(value=named), wall_time=wall_s))
