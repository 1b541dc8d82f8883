"""Starts ranks. The package itself can be called: `paceline.launch(fn, nproc=4)` is `local.launch`.

It must be one object: once anything in here is imported, `paceline.launch` is this module, whatever name
the front door would give.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a function on new ranks of this machine; see `paceline.launch.local.launch`."""
        from paceline.launch.local import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Launch
