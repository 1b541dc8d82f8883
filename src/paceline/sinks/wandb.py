"""The sink `wandb`: Weights & Biases. Its own settings (WANDB_MODE, WANDB_PROJECT ...) apply.

Only settings of the run, metrics and paths of checkpoints are sent. What wandb collects by itself of the
machine, the environment, the script and its output is turned off.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from paceline.sinks.sink import Sink, SinkRun

_SILENT: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "disable_job_creation": True,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "program": "",
    "host": "",
}


class WandbSink(Sink):
    """A run of Weights & Biases, which a later start of the same folder continues.

    Args:
        project: its project. Default: wandb's own.
    """

    name = "wandb"
    rows_per_s = 10  # a row takes 0.1 ms of the interpreter, which a step of 6 ms would notice

    def __init__(self, project: str | None = None) -> None:
        self._project = project

    def begin(self, start: SinkRun) -> None:
        known = start.recall(self.name) or secrets.token_hex(4)
        start.keep(self.name, known)  # first: on a full disk, W&B prints pages of errors of its own log
        self._run = wandb.init(
            project=self._project,
            name=start.folder.name,
            dir=str(start.folder),
            id=known,
            resume="allow",
            config=dict(start.settings),
            reinit="create_new",  # else it is the run of another trainer or of the script, if there is one
            settings=wandb.Settings(**_SILENT),
        )
        # wandb's own count of steps never goes back, as a run does that resumes from an earlier checkpoint.
        for kind in ("train", "valid"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._run.log({"step": number, **{f"train/{key}": value for key, value in values.items()}})

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._run.log({"step": number, **{f"valid/{key}": value for key, value in values.items()}})

    def checkpoint(self, number: int, path: Path) -> None:
        self._run.summary["checkpoint"] = str(path)

    def end(self) -> None:
        self._run.finish()
