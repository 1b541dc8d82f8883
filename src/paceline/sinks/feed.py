"""Passes a run's events to its sinks, in a thread for each, so that none of them delays a step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.sinks.sink import Sink, SinkRun

log = logging.getLogger(__name__)

Call = Callable[[Sink], None]
Row = tuple[int, dict[str, float], float]
# Events that wait for a slow sink. Further ones are dropped, which is logged once.
_MOST_WAITING = 10_000
# How long the end of a run waits for all sinks together.
_CLOSING_S = 30.0


class Feed:
    """The sinks of one start of a run. No method waits for a sink, except `close` for a limited time."""

    def __init__(self, sinks: Sequence[Sink], start: SinkRun) -> None:
        self._lines = [_Line(sink, start) for sink in sinks]

    def send(
        self,
        *,
        steps: Sequence[Row] = (),
        evaluation: Row | None = None,
        saved: tuple[int, Path] | None = None,
    ) -> None:
        """Pass on rows of steps, the results of an evaluation or a checkpoint."""

        def call(sink: Sink) -> None:
            for row in _pick(steps, sink.rows_per_s):
                sink.step(*row)
            if evaluation is not None:
                sink.evaluation(*evaluation)
            if saved is not None:
                sink.checkpoint(*saved)

        for line in self._lines:
            line.put(call)

    def close(self) -> None:
        """End the sinks."""
        until_s = time.monotonic() + _CLOSING_S
        for line in self._lines:
            line.put(Sink.end, is_last=True)
        for line in self._lines:
            line.join(until_s)


def _pick(rows: Sequence[Row], limit: int | None) -> Sequence[Row]:
    """Return about `limit` of the rows of a second, or all."""
    stride, last = -(-len(rows) // (limit or len(rows) or 1)), len(rows) - 1
    return [
        row
        for at, row in enumerate(rows)
        if at == 0 or (last - at) % stride == 0 or row[1].keys() - rows[at - 1][1].keys()
    ]


class _Line:
    """The events that wait for one sink, and the thread that calls it."""

    def __init__(self, sink: Sink, start: SinkRun) -> None:
        self._sink, self._name = sink, sink.name or type(sink).__name__
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._has_failed = False
        self.put(lambda each: each.begin(start))
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"sink {self._name}", daemon=True)
        self._thread.start()

    def put(self, call: Call, *, is_last: bool = False) -> None:
        if not self._has_failed and (is_last or self._waiting.qsize() < _MOST_WAITING):
            self._waiting.put((lambda sink: sink.end()) if is_last else call)
        elif not self._has_failed:
            self._fail(f"it is {_MOST_WAITING} events behind")
        if is_last:
            self._waiting.put(None)

    def join(self, until_s: float) -> None:
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it has not ended within {_CLOSING_S:.0f} s")

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            if self._has_failed:
                continue
            try:
                call(self._sink)
                if self._waiting.empty():
                    self._sink.flush()
            except Exception as error:  # of any kind: training goes on without this sink
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "the sink %s gets nothing more of this start; training and metrics.jsonl go on: %s",
                self._name,
                reason,
            )
