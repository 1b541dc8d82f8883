"""The sink `tensorboard`: event files in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.sinks.event_file import EventFile
from paceline.sinks.sink import Sink, SinkRun

# Of the numbers that every run has, those with a curve. All values of the user's own have one.
_LEFT_OUT = {"epoch", "samples", "tokens", "flops_per_s", "memory_bytes", "save_stall_s", "save_s", "step_s"}


class TensorBoardSink(Sink):
    """The curves `train/...` and `valid/...`; events after the step that a start resumes from are hidden."""

    name = "tensorboard"

    def begin(self, start: SinkRun) -> None:
        self._file = EventFile(start.folder / "tensorboard", purge_step=start.first_step + 1)

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        known = {f"train/{key}": x for key, x in values.items() if key not in _LEFT_OUT and math.isfinite(x)}
        self._file.write(number, known, wall_s)

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._file.write(number, {f"valid/{key}": value for key, value in values.items()}, wall_s)

    def end(self) -> None:
        self._file.close()
