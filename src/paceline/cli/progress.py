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


class _Lines:
    """Lines of steps with the time left, at most every 10 s."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps
        self._first: tuple[int, float] | None = None
        self._last_line_s = 0.0

    def step(self, number: int, values: Mapping[str, float], now_s: float) -> None:
        """Print a step's line, if the last one is old enough or the run ends; `now_s` is the time."""
        self._first = self._first or (number, now_s)
        if number != self._num_steps and now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s = now_s
        unit = "tokens" if "tokens_per_s" in values else "samples"
        text = f"step {number}" + (f"/{self._num_steps}" if self._num_steps else "")
        text += f"  loss {values['loss']:.4f}  grad {values['grad_norm']:.3f}  lr {values['lr']:.2e}"
        text += f"  {format_count(values.get(f'{unit}_per_s', 0.0))} {unit}/s"
        num_taken = number - self._first[0]
        if self._num_steps is not None and num_taken and number < self._num_steps:
            left_s = (now_s - self._first[1]) / num_taken * (self._num_steps - number)
            text += f"  {format_seconds(left_s)} left"
        _print(text)


class ProgressPrinter:
    """A printer of a run's progress for people; a `Reporter` of `train_recipe`."""

    def begin(
        self, *, num_parameters: int, num_steps: int, first_step: int, world: World, layout: Layout
    ) -> None:
        """Show that the run is built."""
        self._lines = _Lines(num_steps)
        ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}"
        kind = world.device.type
        if layout != Layout(dp_replicate=world.world_size):
            kind += f", {layout}"
        _print(f"{format_count(num_parameters)} parameters on {ranks} ({kind}), {num_steps} steps")

    def step(self, step: Step, num_steps: int, tokens_per_sample: int | None) -> None:
        """Show a step."""
        rate = step.num_samples * (tokens_per_sample or 1) / max(step.step_s, 1e-9)
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}
        values |= {"tokens_per_s" if tokens_per_sample else "samples_per_s": rate}
        self._lines.step(step.number, values, time.monotonic())

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Show an evaluation on the validation data."""
        _print(f"step {step}: validation {evaluation}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ProgressSink(Sink):
    """The sink `progress`: lines with the time left, for a loop that prints nothing."""

    name = "progress"

    def begin(self, start: SinkRun) -> None:
        self._lines = _Lines(start.num_steps)

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        if "loss" in values:  # not values that were logged later
            self._lines.step(number, values, wall_s)

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        _print(f"step {number}: validation {shown}")
