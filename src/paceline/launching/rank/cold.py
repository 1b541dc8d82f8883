"""Watches a rank that has its own Python: builds its command, and is the file that Python runs first.

torchrun starts `python -u train.py ARGS`. Here the same Python, with the same flags, runs this file:
`python -u cold.py WATCH RANK FOLDER ATTEMPT train.py ARGS`. It lets the watcher in, sees to it that
multiprocessing's sockets go with the job, takes back what Python has done for it, and runs the script as
`__main__` (`script.py`). Where something is in the way of that, it executes what torchrun would have started,
and the rank is seen from outside only.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NUM_WORDS = 4
"""The number of words in the command before the script's."""


def let_in(command: Sequence[str], watch: str, rank: int, launch_folder: str, folder: str) -> tuple[str, ...]:
    """Return the command of a rank that starts the watch before it runs the script.

    Args:
        command: as torchrun has it, `PYTHON -u SCRIPT ...`. Where that is another Python than this one
            (PYTHON_EXEC), which need not have this package, it is given back as it is.
        watch: see `watching.Watcher.entry`.
        folder: where this attempt's ranks leave word.
    """
    if tuple(command[:2]) != (sys.executable, "-u"):
        return tuple(command)
    return (*command[:2], os.path.abspath(__file__), watch, str(rank), launch_folder, folder, *command[2:])


# ---- in the rank


def _run() -> None:
    loaded = set(sys.modules)
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder
    watch, words = sys.argv[1 : 1 + _NUM_WORDS], sys.argv[1 + _NUM_WORDS :]
    try:
        run_script = _begin(watch, words, loaded)
    except Exception:  # whatever it is, it is not the user's
        os.execv(sys.executable, [sys.executable, "-u", *words])
    run_script()


def _begin(watch: list[str], words: list[str], loaded: set[str]) -> Callable[[], None]:
    """Start the watch, and return the function that runs the script.

    Args:
        loaded: modules that Python has loaded by itself.
    """
    # Last, so that no file beside the package is imported in place of a module of Python.
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    sys.path.append(root)
    try:
        from functools import partial

        from paceline.launching.rank.own_meeting import allow_own_meeting
        from paceline.launching.rank.script import Script, find_first_path, run_as_main
        from paceline.launching.rank.sockets import keep_sockets_in
        from paceline.launching.watcher import load_watch

        entry, rank, launch_folder, folder = watch
        keep_sockets_in(launch_folder)
        allow_own_meeting()
        note_error = load_watch(entry, int(rank), launch_folder, folder)()
    finally:
        sys.path.pop()
    is_module = words[0] == "-m"
    target, *args = words[int(is_module) :]
    script = Script(target, tuple(args), is_module)
    first = find_first_path(script)
    if first is not None:
        _forget_shadowed(first, loaded)
    return partial(run_as_main, script, None, lambda: note_error, is_as_started=True)


def _forget_shadowed(folder: str, loaded: set[str]) -> None:
    """Remove modules from `sys.modules` that the script would find in its own folder."""
    from importlib.machinery import PathFinder

    for name in set(sys.modules) - loaded:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        # Built-in and frozen modules come before any folder.
        if "." in name or origin in (None, "built-in", "frozen"):
            continue
        own = PathFinder.find_spec(name, [folder])
        if own is not None and own.origin not in (None, origin):
            for inner in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                del sys.modules[inner]


if __name__ == "__main__":
    _run()
