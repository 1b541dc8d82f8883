"""Paceline: distributed PyTorch training that gives the same answer on any number of machines.

Names load on first use, so that `import paceline` does not import torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"Paceline runs on Linux, and this is {sys.platform}: its launcher and its watch read /proc. "
        "On Windows use WSL 2, and on macOS a container (docs/install.md)."
    )

from paceline.launching import watcher as _watching

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.huggingface.factory import pretrained
    from paceline.launching.ending.endings import RankFailed
    from paceline.launching.local import launch
    from paceline.launching.watcher import JobStuck
    from paceline.recipe import Recipe, load_recipe
    from paceline.sinks.sink import Sink
    from paceline.train.average import Average
    from paceline.train.loop import Loop, parallelize
    from paceline.train.schedule import schedule
    from paceline.train.stopping import Stopped
    from paceline.train.trainer import Trainer
    from paceline.verifying.check import verify
    from paceline.world import World, start

__version__ = "0.1.0"

__all__ = [
    "Average",
    "JobStuck",
    "Loop",
    "PacelineError",
    "RankFailed",
    "Recipe",
    "Sink",
    "Stopped",
    "Trainer",
    "World",
    "__version__",
    "launch",
    "load_recipe",
    "parallelize",
    "pretrained",
    "schedule",
    "start",
    "verify",
]

_HOMES = {
    "Average": "train.average",
    "JobStuck": "launching.watcher",
    "Loop": "train.loop",
    "PacelineError": "errors",
    "RankFailed": "launching.ending.endings",
    "Recipe": "recipe",
    "Sink": "sinks.sink",
    "Stopped": "train.stopping",
    "Trainer": "train.trainer",
    "World": "world",
    "launch": "launching.local",
    "load_recipe": "recipe",
    "pretrained": "huggingface.factory",
    "parallelize": "train.loop",
    "schedule": "train.schedule",
    "start": "world",
    "verify": "verifying.check",
}


def _build_watcher(hang_after_s: float) -> _watching.Watcher:
    """Build the watcher of ranks launched from Python; `paceline run` watches its ranks in the same way."""
    from paceline.watch.launcher.watcher import RankWatcher

    log = logging.getLogger("paceline.watch")
    return RankWatcher(hang_after_s, keep_alive=False, report=lambda message: log.warning("%s", message.text))


_watching.build_default = _build_watcher


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
