"""Shows a run's progress by an occasional line."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from paceline.recipe import Layout
from paceline.sinks.sink import Sink, SinkRun
from paceline.train.evaluation import Evaluation
from paceline.train.step import Step
from paceline.units import format_count, format_seconds
from paceline.world import World

_LINE_EVERY_S = 10.0


def log_to_stderr(world: World) -> None:
    """Show the package's warnings: rank 0's on the terminal, every rank's in its log."""
    logger = logging.getLogger("paceline")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if world.is_main else f"rank {world.rank}: "
    handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s: %(message)s"))
    logger.addHandler(handler)


class ProgressPrinter:
    """A printer of a run's progress for people; a `Reporter` of `train_recipe`."""

    def __init__(self) -> None:
        self._last_line_s = 0.0
        self._first: tuple[int, float] | None = None

    def begin(
        self, *, num_parameters: int, num_steps: int, first_step: int, world: World, layout: Layout
    ) -> None:
        """Show that the run is built."""
        ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}"
        kind = world.device.type
        if layout != Layout(dp_replicate=world.world_size):
            kind += f", {layout}"
        _print(f"{format_count(num_parameters)} parameters on {ranks} ({kind}), {num_steps} steps")

    def step(self, step: Step, num_steps: int, tokens_per_sample: int | None) -> None:
        """Show a step."""
        now_s = time.monotonic()
        self._first = self._first or (step.number, now_s)
        if step.number != num_steps and now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s = now_s
        unit = "tokens" if tokens_per_sample else "samples"
        rate = step.num_samples * (tokens_per_sample or 1) / max(step.step_s, 1e-9)
        _print(
            f"step {step.number}/{num_steps}  loss {step.loss:.4f}  grad {step.grad_norm:.3f}  "
            f"lr {step.lr:.2e}  {format_count(rate)} {unit}/s"
            + _describe_left(self._first, (step.number, now_s), num_steps)
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Show an evaluation on the validation data."""
        _print(f"step {step}: validation {evaluation}")


def _describe_left(first: tuple[int, float], now: tuple[int, float], num_steps: int | None) -> str:
    """Return the time left, from the numbers and times of the first step and this one; or nothing."""
    num_taken = now[0] - first[0]
    if num_steps is None or not num_taken or now[0] >= num_steps:
        return ""
    return f"  {format_seconds((now[1] - first[1]) / num_taken * (num_steps - now[0]))} left"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ProgressSink(Sink):
    """The sink `progress`: a line with the time left, at most every 10 s, for a loop that prints nothing."""

    name = "progress"

    def begin(self, start: SinkRun) -> None:
        self._num_steps = start.num_steps
        self._first: tuple[int, float] | None = None
        self._last_line_s = 0.0

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        if "loss" not in values:  # values that were logged later
            return
        self._first = self._first or (number, wall_s)
        is_last = number == self._num_steps
        if wall_s - self._last_line_s < _LINE_EVERY_S and not is_last:
            return
        self._last_line_s = wall_s
        text = f"step {number}" + (f"/{self._num_steps}" if self._num_steps else "")
        text += f"  loss {values['loss']:.4f}  {format_count(values.get('samples_per_s', 0.0))} samples/s"
        _print(text + _describe_left(self._first, (number, wall_s), self._num_steps))

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        _print(f"step {number}: validation {shown}")
