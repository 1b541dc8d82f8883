"""Runs a user's script as `__main__`, in a process that Python started for something else.

The script must see what it would see as `python -u script.py ARGS`: `sys.argv`, `sys.path`, `__main__` with
`__file__` and a spec, unbuffered standard streams; and leave as it would: by its exit code, with its atexit
handlers run. (`python -m MODULE` is the standard library's own `runpy`.) A process that is about to become
the script raises `Become`, which unwinds the stack up to `cli/main.py`.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from paceline.errors import PacelineError
from paceline.launching.ending.endings import describe_ending, write_ending
from paceline.launching.watcher import NoteError, ignore_error


@dataclass(frozen=True)
class Script:
    """The script to run, with its arguments.

    Attributes:
        target: a path, or a module's name.
        args: the words after it.
        is_module: whether to run it as `python -m` does.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words that follow `python -u` on a command line."""
        return (*(("-m",) if self.is_module else ()), self.target, *self.args)


@dataclass(frozen=True)
class EndReportPath:
    """The file for the record of a rank's end.

    Attributes:
        folder: the launcher's folder for this attempt.
        log: the rank's log; an uncaught exception is written there, and the launcher reports it.
    """

    rank: int
    folder: str
    log: str


class Become(BaseException):
    """The exception by which a process leaves all of its calls to run a script."""

    def __init__(self, script: Script, place: EndReportPath | None, prepare: Callable[[], NoteError]) -> None:
        super().__init__(script)
        self.script = script
        self.place = place
        self.prepare = prepare


def check_script(script: Script) -> None:
    """Raise PL340 if there is nothing to run."""
    if script.is_module:
        return
    path = Path(script.target)
    if path.is_dir() and not (path / "__main__.py").is_file():
        saw, fix = f"{script.target} is a folder without a __main__.py.", "Name the script in it."
    elif not path.exists():
        saw, fix = f"{script.target} does not exist (seen from {Path.cwd()}).", "Check the path."
    elif not path.is_dir() and not path.is_file():
        # Reading a pipe would wait for a writer, on every rank.
        saw, fix = f"{script.target} is not a file but a pipe, a socket or a device.", "Name a file."
    elif not path.is_dir() and not os.access(path, os.R_OK):
        saw, fix = f"{script.target} cannot be read.", "Check its permissions."
    else:
        return
    raise PacelineError("PL340", saw=saw, rule="Every rank runs the script that you name.", fix=fix)


def run_as_main(
    script: Script,
    place: EndReportPath | None,
    prepare: Callable[[], NoteError],
    *,
    is_as_started: bool = False,
) -> None:
    """Run the script as Python would, and end as the script does: by its exception or its return.

    Args:
        script: what to run.
        place: where to leave word of its end.
        prepare: called first; returns the function to call with the exception that ends the script.
        is_as_started: whether Python was started with `-u`, for this script, and its streams are right.
    """
    if place is not None:
        # faulthandler writes the Python line there if compiled code crashes; the file stays open.
        log = open(place.log, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        faulthandler.enable(log, all_threads=False)
    if not is_as_started:
        _take_streams()
    sys.argv = [script.target, *script.args]
    sys.orig_argv = [sys.executable, "-u", *script.words]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    note_error: NoteError = ignore_error
    try:
        note_error = prepare()
        _execute(script, main)
    except BaseException as error:
        _strip(error)
        note_error(error)
        if place is not None:
            _leave_word(place, error)
        # The exception is already reported; raised again, it makes Python exit as after any exception.
        if not isinstance(error, SystemExit):
            if place is None or not _is_default_hook():
                sys.excepthook(type(error), error, error.__traceback__)
            sys.excepthook = lambda *_: None
        raise


def find_first_path(script: Script) -> str | None:
    """Return what Python puts first on `sys.path`: the script's folder, its archive, or the one of `-m`."""
    if not script.is_module and _has_main(script):
        return os.path.abspath(script.target)
    if sys.flags.safe_path:
        return None
    if script.is_module:
        return os.getcwd()
    return os.path.dirname(os.path.realpath(os.path.join(os.getcwd(), script.target)))


def _has_main(script: Script) -> bool:
    """Return whether the path is a folder or an archive with a __main__.py."""
    return pkgutil.get_importer(script.target) is not None


def _execute(script: Script, main: types.ModuleType) -> None:
    first = find_first_path(script)
    if first is not None:
        sys.path.insert(0, first)
    if script.is_module:
        sys.argv[0] = "-m"
        runpy._run_module_as_main(script.target)  # type: ignore[attr-defined]
        return
    if _has_main(script):
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), script.target)  # not normalized, as Python leaves it
    main.__dict__.update(__file__=path, __cached__=None, __spec__=None)
    with io.open_code(path) as file:
        text = file.read()
    code: types.CodeType
    if text.startswith(importlib.util.MAGIC_NUMBER):
        compiled = importlib.machinery.SourcelessFileLoader("__main__", path)
        main.__dict__["__loader__"] = compiled
        code = cast(types.CodeType, compiled.get_code("__main__"))
    else:
        main.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
        code = compile(text, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _take_streams() -> None:
    """Open the standard streams as `python -u` does: output is written at once."""
    with suppress(Exception):  # started with stdin closed
        sys.stdin.reconfigure(write_through=True)  # type: ignore[union-attr]
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        with suppress(Exception):
            old.flush()
        try:
            raw = io.FileIO(fd, "wb", closefd=False)
        except OSError:  # started with the stream closed
            continue
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            raw,
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors=getattr(old, "errors", None) or ("backslashreplace" if fd == 2 else "strict"),
            newline="\n",
            write_through=True,
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


# ---- how it ended


def _strip(error: BaseException) -> None:
    """Remove the frames of this file and of `runpy` from the traceback, as if the script had begun it."""
    frames = error.__traceback__
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    error.__traceback__ = frames


def _is_default_hook() -> bool:
    """Return whether uncaught exceptions are only printed: by Python, by torch with the rank, or by
    `print_errors_alone`."""
    hook = sys.excepthook
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith(("torch.", "paceline."))


def _leave_word(place: EndReportPath, error: BaseException) -> None:
    ending = describe_ending(place.rank, error)
    if ending.kind == "exit" and ending.code == 0:
        return
    with suppress(OSError):  # the launcher is gone
        write_ending(Path(place.folder), ending)
    if ending.kind == "error":
        with suppress(OSError), open(place.log, "a", encoding="utf-8", errors="backslashreplace") as log:
            log.writelines(traceback.format_exception(error))


def list_sources(script: Script) -> Iterator[Path]:
    """Return the script's file, if it has one that can be read as text."""
    if not script.is_module:
        path = Path(script.target)
        yield path / "__main__.py" if path.is_dir() else path
        return
    parts = script.target.split(".")
    for root in ([] if sys.flags.safe_path else [Path.cwd()]) + [Path(entry) for entry in sys.path if entry]:
        whole = root.joinpath(*parts)
        for path in (whole.with_suffix(".py"), whole / "__main__.py"):
            if path.is_file():
                yield path
                return
