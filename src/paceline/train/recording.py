"""Records a trainer's steps: writes metrics to the run's folder, and counts skipped steps in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.recipe import Layout
from paceline.sinks.feed import Feed
from paceline.sinks.sink import Sink, SinkRun
from paceline.train.metrics import MetricsWriter, describe_step, find_peak_flops, read_number
from paceline.train.state.saving import SaveHandle
from paceline.train.step import SaveTimes, Step
from paceline.train.update import ONE_IS_NAN, Update
from paceline.world import World

log = logging.getLogger(__name__)


class StepRecords:
    """The metrics of steps and evaluations in the run's folder, written by rank 0.

    Args:
        peak_flops: of one rank's device; `None` to use the known value of a common GPU.
        tokens_per_sample: for tokens/s.
        sinks: what else gets the metrics.
        describe: returns the settings of the run, for sinks.
        needs_folder: whether sinks without a run's folder are a mistake.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        *,
        dtype: str,
        peak_flops: float | None,
        tokens_per_sample: int | None,
        sinks: Sequence[Sink],
        describe: Callable[[], Mapping[str, Any]],
        needs_folder: bool,
    ) -> None:
        self._world, self._layout = world, str(layout)
        peak = peak_flops or find_peak_flops(world.device, dtype)
        self._peak_flops = peak * world.world_size if peak else None
        self._tokens_per_sample = tokens_per_sample
        self._sinks, self._describe = sinks, describe
        self._needs_folder = needs_folder and bool(sinks)
        self._num_steps: int | None = None
        self._saving: SaveHandle | None = None
        self._folder: Path | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._writer: MetricsWriter | None = None

    def begin(self, folder: Path, step: int) -> None:
        """Write to `folder` from now on, after its rows up to `step`."""
        self._folder, self._first_step, self._last_step = folder, step, step
        if step and self._world.is_main:
            log.warning("resuming after step %d of %s", step, folder)

    def write_step(
        self,
        step: Step,
        num_samples: int,
        updates: Collection[Update],
        save_times: SaveTimes,
        values: Mapping[str, float],
        num_steps: int | None,
    ) -> None:
        """Write a step.

        Args:
            num_samples: of the run, up to it.
            save_times: of the saves since the step before.
            values: the user's own, by name.
            num_steps: of the whole run, if known.
        """
        self._num_steps, self._last_step = num_steps, step.number
        if self._needs_folder and self._folder is None:
            raise _no_folder_error("sinks=")
        writer = self._open()
        if writer is not None:
            memory_bytes, gpu = writer.measure(self._world.device)
            flops = [update.runner.flops_per_sample for update in updates]
            row = describe_step(
                step,
                samples=num_samples,
                tokens_per_sample=self._tokens_per_sample,
                flops_per_sample=sum(f for f in flops if f) or None,
                peak_flops=self._peak_flops,
                memory_bytes=memory_bytes,
                save_times=save_times,
                layout=self._layout,
            )
            # A loop that calls loss.backward() by itself knows the loss better.
            writer.write(row | gpu | {name: value for name, value in values.items() if name == "loss"})
            if own := {name: value for name, value in values.items() if name != "loss"}:
                writer.amend(own)
            self._pass_on_saved(writer)

    def log(self, values: Mapping[str, Any]) -> None:
        """Add the user's own values to the row of the latest step."""
        if self._folder is None:
            raise _no_folder_error("log()")
        numbers = {name: read_number(name, value) for name, value in values.items()}
        writer = self._open()
        if writer is not None:
            writer.amend(numbers)

    def note_save(self, handle: SaveHandle) -> None:
        """Tell sinks of a checkpoint, once it is complete."""
        self._saving = handle
        if self._writer is not None:
            self._pass_on_saved(self._writer)

    def _pass_on_saved(self, writer: MetricsWriter) -> None:
        handle = self._saving
        if handle is not None and handle.outcome is not None:
            self._saving = None
            if writer.feed is not None and not handle.failed:
                writer.feed.send(saved=(handle.step, handle.path))

    def write_update(self, row: dict[str, Any]) -> None:
        """Write which update an asynchronous step applies, before `write_step`."""
        writer = self._open()
        if writer is not None:
            writer.write_update(row)

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Write the results of an evaluation after `step`, by name."""
        writer = self._open()
        if writer is not None:
            writer.write_evaluation(step, values)

    def flush(self) -> None:
        """Write all rows so far to the files."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files; the next write opens them again, after the rows so far."""
        if self._writer is not None:
            self._pass_on_saved(self._writer)
            self._writer.close()
            self._writer, self._first_step = None, self._last_step

    def _open(self) -> MetricsWriter | None:
        if self._writer is None and self._first_step is not None and self._world.is_main:
            assert self._folder is not None
            start = SinkRun(self._folder, self._first_step, self._describe(), self._num_steps)
            self._writer = MetricsWriter(
                self._folder,
                last_step=self._first_step,
                open_feed=(lambda: Feed(self._sinks, start)) if self._sinks else None,
            )
            self._first_step = None
        return self._writer


def _no_folder_error(what: str) -> PacelineError:
    return PacelineError(
        "PL403",
        saw=f"{what} without resume().",
        rule="Metrics are those of a run, which has a folder.",
        fix='Call trainer.resume("runs/demo") before the first step; an empty or missing folder starts a '
        "new run.",
    )


class SkippedSteps:
    """A counter of skipped steps in a row, which stops the run at a limit.

    Args:
        most: the number in a row that stops the run.

    Attributes:
        num_in_a_row: skipped steps in a row, up to the latest step.
    """

    def __init__(self, most: int) -> None:
        self.num_in_a_row = 0
        self._most = most

    def count(self, step: Step) -> None:
        """Count a step; raise PL431 if the limit of skipped steps in a row is reached."""
        if step.skipped is None:
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        log.warning("step %d skipped: %s", step.number, step.skipped)
        if self.num_in_a_row >= self._most:
            raise _too_many_error(step, step.skipped, self._most)


def _too_many_error(step: Step, reason: str, most: int) -> PacelineError:
    return PacelineError(
        "PL431",
        saw=f"{most} steps in a row were skipped, the last one (step {step.number}) because {reason}.",
        rule="A step whose loss or gradient is not finite on any rank leaves the weights alone on "
        f"all; {most} in a row is the limit (max_skipped_in_a_row).",
        fix="Lower the learning rate, add warm-up, check the data of that microbatch; the last checkpoint "
        "is from before."
        + (
            " If the loss is a mean over targets, a microbatch without targets has 0/0: return "
            "(sum of losses, number of targets) instead."
            if ONE_IS_NAN in reason
            else ""
        ),
    )
