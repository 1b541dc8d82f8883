"""Calls a function as soon as the script has imported a package, at any time and in any thread.

A finder stands first on `sys.meta_path` until then. The package's own loader does the import, and keeps no
trace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# Python takes frames of its import system out of tracebacks, down to one of this name. With ours among them,
# an import that fails or is interrupted has the traceback that it would have without us.
_FILE = "<frozen importlib._bootstrap>"
_FUNCTION = "_call_with_frames_removed"


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a package once it is imported, or now if it already is.

    What `then` raises is not seen by who imports. A package that is loaded may be hidden afterwards
    (`paceline.launching.warm.warm`); where it is hidden already, this must be the last to hide or listen.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _ImportNotifier(name, then))


class _ImportNotifier:
    """A finder that delegates to the other finders, and listens to the loader that they return."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or getattr(self._asking, "is_on", False):
            return None
        self._asking.is_on = True
        try:
            spec = _ask_others(self, name, path, target)
        finally:
            self._asking.is_on = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            with suppress(AttributeError):  # a loader without attributes of its own
                self._listen(spec.loader)
        return spec

    def _listen(self, loader: Any) -> None:
        execute = loader.exec_module
        another = getattr(loader, "__dict__", {}).get("exec_module")  # of a second listener

        def exec_module(module: ModuleType) -> None:
            if another is None:
                del loader.exec_module
            else:
                loader.exec_module = another
            execute(module)
            with suppress(ValueError):
                sys.meta_path.remove(self)
            with suppress(Exception):
                self._then(module)

        exec_module.__code__ = exec_module.__code__.replace(co_filename=_FILE, co_name=_FUNCTION)
        loader.exec_module = exec_module


def _ask_others(first: _ImportNotifier, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is first or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
