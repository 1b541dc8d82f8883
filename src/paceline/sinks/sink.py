"""`Sink`: the receiver of a run's metrics and events, and how one is found by its name."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

GROUP = "paceline.sinks"
_BUILT_IN = {
    "csv": "paceline.sinks.csv_file:CsvSink",
    "mlflow": "paceline.sinks.mlflow:MlflowSink",
    "progress": "paceline.cli.progress:ProgressSink",
    "tensorboard": "paceline.sinks.tensorboard:TensorBoardSink",
    "wandb": "paceline.sinks.wandb:WandbSink",
}
_KEPT = "sinks.json"


@dataclass(frozen=True)
class SinkRun:
    """One start of a run, as its sinks see it.

    Attributes:
        folder: of the run.
        first_step: the step that it resumes from; 0 for a new run.
        settings: of the run, JSON-able. They have nothing of the environment.
        num_steps: steps of the whole run, if that is known.
    """

    folder: Path
    first_step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int | None = None

    def recall(self, sink: str) -> str | None:
        """Return what a sink kept in an earlier start, such as the id of the run on its server."""
        return self._read().get(sink)

    def keep(self, sink: str, text: str) -> None:
        """Keep a text for later starts."""
        (self.folder / _KEPT).write_text(json.dumps(self._read() | {sink: text}), encoding="utf-8")

    def _read(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.folder / _KEPT).read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}


class Sink:
    """A receiver of a run's metrics and events. A subclass overrides the methods that it needs.

    Rank 0 calls them, in one thread per sink and in the order of events, never from the thread that trains.
    An exception is logged once, and the sink gets no further calls.

    Attributes:
        name: tells the sinks of one run apart.
        rows_per_s: about so many rows of steps, with all new names; `None` for those of all steps.
    """

    name = ""
    rows_per_s: int | None = None

    def begin(self, start: SinkRun) -> None:
        """Begin: the run is built and has resumed."""

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        """Take numbers of a step; more than once for a step whose values were logged later.

        Args:
            number: of the step, from 1.
            values: by name.
            wall_s: the time in seconds since 1970.
        """

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        """Take the results of an evaluation after a step."""

    def checkpoint(self, number: int, path: Path) -> None:
        """Learn that the checkpoint of a step is complete."""

    def flush(self) -> None:
        """Make what was taken visible; called when no further event waits."""

    def end(self) -> None:
        """End: nothing follows in this process."""


def build_sinks(sinks: str | Sink | Sequence[str | Sink]) -> list[Sink]:
    """Return sinks from names and objects.

    Raises:
        PacelineError: PL733 for an unknown name, or two sinks of one name.
    """
    given = [sinks] if isinstance(sinks, (str, Sink)) else list(sinks)
    built = [_build(each) if isinstance(each, str) else each for each in given]
    names = []
    for each in built:
        names.append(each.name or type(each).__name__)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise _unusable(
            f"two sinks of the name {twice[0]}.", "Leave one out, or give its class another `name`."
        )
    return built


def _build(name: str) -> Sink:
    found = {each.name: each.value for each in entry_points(group=GROUP)} | _BUILT_IN
    if name not in found:
        raise _unusable(f"sinks= has {name!r}.", f"The names here are {', '.join(sorted(found))}.")
    module, _, attribute = found[name].partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise _unusable(
            f"the sink {name!r} cannot be imported: {error}.",
            f"Install what it needs, for example pip install 'paceline[{name}]', or leave it out.",
        ) from error
    sink: Sink = make()
    return sink


def _unusable(saw: str, fix: str) -> PacelineError:
    return PacelineError(
        "PL733",
        saw=saw,
        rule="A sink receives the metrics of a run, and each has a name of its own.",
        fix=fix,
    )
