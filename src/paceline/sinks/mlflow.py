"""The sink `mlflow`: a run of MLflow, on the server that MLFLOW_TRACKING_URI names.

Only settings of the run, metrics and paths of checkpoints are sent. MLflow's client is used in place of
`mlflow.start_run`, which adds tags with the user's name, the script and the commit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from paceline.sinks.sink import Sink, SinkRun

# Limits of MLflow: metrics in one call, parameters in one call, and the length of a parameter.
_MOST_METRICS, _MOST_PARAMS, _MOST_LETTERS = 1000, 100, 6000


class MlflowSink(Sink):
    """A run of MLflow, which a later start of the same folder continues.

    Args:
        experiment: its experiment, created if it is missing.
        tracking_uri: of the server. Default: MLflow's own.
    """

    name = "mlflow"
    rows_per_s = 10  # a row takes 0.5 ms of the interpreter, which a step of 6 ms would notice

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        self._experiment, self._uri = experiment, tracking_uri

    def begin(self, start: SinkRun) -> None:
        self._client, self._waiting = MlflowClient(self._uri), list[Any]()
        known = start.recall(self.name)
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        )
        self._id = self._client.create_run(experiment, run_name=start.folder.name).info.run_id
        start.keep(self.name, self._id)
        params = [Param(key, str(value)[:_MOST_LETTERS]) for key, value in start.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._add("train", number, values, wall_s)

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._add("valid", number, values, wall_s)

    def _add(self, kind: str, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._waiting += [Metric(f"{kind}/{key}", x, int(wall_s * 1e3), number) for key, x in values.items()]
        if len(self._waiting) >= _MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]

    def checkpoint(self, number: int, path: Path) -> None:
        self._client.set_tag(self._id, "checkpoint", str(path))

    def end(self) -> None:
        self.flush()
        self._client.set_terminated(self._id, end_time=int(time.time() * 1e3))
