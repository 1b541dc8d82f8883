"""`run_as_main` against `python -u`: the same script sees and leaves the same. Without torch."""

from __future__ import annotations

import difflib
import json
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import zipapp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.launching.rank.script import Script, check_script

# As the console script does it, from a folder of its own.
START = """
import sys
from paceline.launching.rank.script import EndReportPath, Script, run_as_main
from paceline.launching.watcher import ignore_error
folder, is_module, target, *args = sys.argv[1:]
place = EndReportPath(3, folder, folder + "/log") if folder else None
sys.exit(run_as_main(Script(target, tuple(args), is_module == "-m"), place, lambda: ignore_error))
"""


@dataclass
class Outcome:
    """The outcome of a run."""

    code: int
    out: str
    err: str
    log: str = ""
    ending: dict[str, Any] | None = None


class Runner:
    """Runs scripts of a folder, in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.bin = folder / "bin"
        for path in (self.folder, self.bin):
            path.mkdir()
        (self.bin / "start.py").write_text(START)
        self.env: dict[str, str] = {}

    def write(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def _open(self, words: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.Popen(
            [sys.executable, *words],
            *(-1, None, pipe, pipe, pipe),
            cwd=self.folder,
            text=True,
            env=environ | self.env,
        )

    def _open_ours(self, words: Sequence[str], place: str = "") -> subprocess.Popen[str]:
        is_module = words[0] == "-m"
        return self._open(
            [str(self.bin / "start.py"), place, "-m" if is_module else "", *words[int(is_module) :]]
        )

    def compare(self, *words: str) -> Outcome:
        """Run `python -u WORDS` and the same as ours, side by side; they must leave the same."""
        running = [self._open(["-u", *words]), self._open_ours(words)]
        seen = [Outcome(0, *p.communicate("input\n", timeout=60)) for p in running]
        for process, outcome in zip(running, seen, strict=True):
            outcome.code = process.returncode
        pythons, ours = seen
        for a, b in ((pythons.out, ours.out), (pythons.err, ours.err)):
            assert not list(difflib.unified_diff(a.splitlines(), b.splitlines(), "python", "ours", n=0))
        assert ours.code == pythons.code
        return ours

    def run(self, *words: str) -> Outcome:
        """Run it as a rank, which leaves word."""
        place = self.bin / "place"
        place.mkdir(exist_ok=True)
        process = self._open_ours(words, str(place))
        out, err = process.communicate("", timeout=60)
        log, ending = place / "log", place / "ending-3.json"
        return Outcome(
            process.returncode,
            out,
            err,
            log.read_text() if log.exists() else "",
            json.loads(ending.read_text()) if ending.exists() else None,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


# ---- what the script sees

TELL = """
'''The script's own words.'''
import json, os, sys
def tell_streams(stream):
    names = ("name", "encoding", "errors", "newlines", "line_buffering", "write_through")
    buffer = stream.buffer
    return [repr(getattr(stream, name, "none")) for name in names] + [
        type(buffer).__name__, getattr(buffer, "mode", "none"), stream.fileno(), stream.isatty()]
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path[0],
    "file": os.fspath(__file__),
    "name": __name__,
    "doc": __doc__,
    "package": __package__,
    "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent],
    "loader": type(__loader__).__name__,
    "is_main": main.__dict__ is globals(),
    "names": sorted(name for name in globals()),
    "builtins": repr(__builtins__),
    "streams": [tell_streams(s) for s in (sys.stdout, sys.stderr)],
    "originals": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "stdin": [sys.stdin.read(), sys.stdin.encoding, sys.stdin.fileno()],
    "path_folder": os.getcwd() in sys.path,
}, indent=1))
"""


def lay_out(runner: Runner, way: str) -> list[str]:
    """Write `TELL` as what `way` says; return the words that run it."""
    if way == "-m":
        runner.write("", "pack/__init__.py")
        runner.write(TELL, "pack/tool.py")
        return ["-m", "pack.tool"]
    if way == "-m package":
        runner.write("print('first')", "pack/__init__.py")
        runner.write(TELL, "pack/__main__.py")
        return ["-m", "pack"]
    if way in ("folder", "archive", "zipapp"):
        runner.write("from beside import word; print(word)" + TELL, "app/__main__.py")
        runner.write("word = 'beside'", "app/beside.py")
        if way == "folder":
            return ["app"]
        interpreter = "/usr/bin/env python3" if way == "zipapp" else None
        zipapp.create_archive(runner.folder / "app", runner.folder / "app.pyz", interpreter)
        return ["app.pyz"]
    path = runner.write(TELL, "sub/train.py")
    if way == "link":
        (runner.folder / "link.py").symlink_to(path)
        return ["link.py"]
    if way == "compiled":
        py_compile.compile(str(path), str(runner.folder / "train.pyc"))
        return ["train.pyc"]
    if way == "no suffix":
        path.rename(runner.folder / "train")
        return ["train"]
    return [{"path": "sub/train.py", "dots": "./sub/../sub/train.py", "whole": str(path)}[way]]


@pytest.mark.parametrize(
    "way",
    [
        *("path", "dots", "whole", "link", "no suffix", "compiled"),
        *("-m", "-m package", "folder", "archive", "zipapp"),
    ],
)
def test_a_script_sees_what_python_shows_it(way: str, runner: Runner) -> None:
    done = runner.compare(*lay_out(runner, way), "--lr", "1", "-x", "")
    assert done.code == 0, done.err
    assert '"--lr"' in done.out


def test_the_mode_of_streams(runner: Runner) -> None:
    """It is part of what `print(sys.stdout)` tells."""
    runner.write("import sys; print(sys.stdout, sys.stdout.mode, sys.stderr)")
    runner.compare("train.py")


def test_encodings_are_the_sources_own(runner: Runner) -> None:
    path = runner.folder / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('\xe9'), end='\\r\\n')\n".encode("latin-1"))
    assert runner.compare("latin.py").out == "'\\xe9'\n"  # subprocess reads line ends so


SCRIPTS = {
    "output in order": """
        import sys, os
        for n in range(3):
            print("out", n, end=" "); os.write(1, b"raw\\n"); sys.stderr.write("err")
        sys.stdout.buffer.write(b"bytes\\n")
    """,
    "exit None": "import sys; print(1); sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit text": "import sys; sys.exit('no more road')",
    "exit object": "import sys; sys.exit(['a', 2])",
    "raise SystemExit": "raise SystemExit(4)",
    "os._exit": "import os; print('a', end=''); os._exit(5)",
    "error": """
        def f(n):
            return 1 / n
        try:
            f(0)
        except ZeroDivisionError as e:
            raise ValueError("two\\nlines") from e
    """,
    "error while handling": """
        try:
            {}["a"]
        except KeyError:
            undefined_name
    """,
    "syntax error": "print(1)\nx = = 2\n",
    "indentation error": "def f():\nx = 2\n",
    "hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind, error, trace.tb_lineno)
        raise ValueError("x")
    """,
    "hook that exits": """
        import sys
        sys.excepthook = lambda *_: sys.exit(9)
        raise ValueError("x")
    """,
    "interrupt": "print('a'); raise KeyboardInterrupt",
    "interrupt by signal": "import os, signal; print('a'); os.kill(os.getpid(), signal.SIGINT)",
    "killed": "import os, signal; print('a'); os.kill(os.getpid(), signal.SIGTERM)",
    "atexit": """
        import atexit
        for n in range(3):
            atexit.register(print, "bye", n)
        class Last:
            def __del__(self): print("deleted")
        last = Last()
    """,
    "atexit after an error": "import atexit; atexit.register(print, 'bye'); raise ValueError('x')",
    "threads": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        print("main")
    """,
    "threads after an error": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        raise ValueError("x")
    """,
    "warnings": "import warnings; warnings.warn('old', DeprecationWarning); warnings.warn('new')",
    "pickle": """
        import pickle, dataclasses
        @dataclasses.dataclass
        class Point:
            x: int
        print(pickle.loads(pickle.dumps(Point(3))), Point.__module__)
        import __main__, inspect
        print(__main__.Point is Point, inspect.getsource(Point), inspect.getfile(Point))
    """,
    "future": """
        from __future__ import annotations
        import typing
        def f(x: nowhere): pass
        y: int = 3
        print(f.__annotations__, __annotations__)
    """,
    "no future": "def f(x: int): pass\nprint(f.__annotations__)\n",
    "exception group": """
        def f(n):
            raise ValueError(n)
        errors = []
        for n in range(2):
            try:
                f(n)
            except ValueError as e:
                errors.append(e)
        raise ExceptionGroup("both", errors)
    """,
    "unprintable error": """
        class Odd(Exception):
            def __str__(self): raise RuntimeError("no words")
        raise Odd
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_what_it_leaves_under_python(name: str, runner: Runner) -> None:
    runner.write(SCRIPTS[name])
    runner.compare("train.py")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_children_find_functions_of_main(method: str, is_module: bool, runner: Runner) -> None:
    runner.write(
        f"""
        import multiprocessing, sys
        def square(x, queue):
            queue.put((x * x, __name__ in ("__main__", "__mp_main__"), sys.argv))
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            child = context.Process(target=square, args=(7, queue))
            child.start()
            print(queue.get(timeout=30))
            child.join()
            print(child.exitcode)
        """,
        "many.py",
    )
    words = ["-m", "many"] if is_module else ["many.py"]
    done = runner.compare(*words, "word")
    assert done.out.startswith("(49, True"), done.err
    assert done.out.endswith("\n0\n")


def test_a_module_that_is_not_there(runner: Runner) -> None:
    assert runner.compare("-m", "no_such_module").code == 1


def test_closed_streams_are_harmless(runner: Runner) -> None:
    runner.write("import sys, os; os.write(2, b'%d' % (sys.stdout is None)); raise SystemExit(6)")
    words = ["sh", "-c", 'exec "$@" >&- <&-', "sh", sys.executable]
    for start in (["-u"], [str(runner.bin / "start.py"), "", ""]):
        done = subprocess.run(
            [*words, *start, "train.py"], cwd=runner.folder, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (6, "1")


# ---- the word that a rank leaves


def test_a_rank_that_ends_well_leaves_none(runner: Runner) -> None:
    runner.write("print('good'); raise SystemExit(0)")
    assert runner.run("train.py") == Outcome(0, "good\n", "")


@pytest.mark.parametrize(
    ("end", "code", "trace"), [("3", 3, ""), ("'no more road'", 1, "no more road"), ("-1", 255, "")]
)
def test_exit_codes_are_left(end: str, code: int, trace: str, runner: Runner) -> None:
    runner.write(f"import sys; sys.exit({end})")
    done = runner.run("train.py")
    assert done.code == code
    assert done.ending is not None
    left = {name: done.ending[name] for name in ("rank", "kind", "code", "trace", "follower")}
    assert left == {"rank": 3, "kind": "exit", "code": code, "trace": trace, "follower": False}
    assert (done.err, done.log) == (trace and f"{trace}\n", "")


def test_a_traceback_is_in_the_log_and_the_record_and_not_on_the_terminal(runner: Runner) -> None:
    path = runner.write("def f():\n    raise ValueError('boo')\nprint('a')\nf()\n")
    done = runner.run("train.py")
    trace = (
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 4, in <module>\n    f()\n'
        f"  File \"{path}\", line 2, in f\n    raise ValueError('boo')\n"
        "ValueError: boo\n"
    )
    assert (done.code, done.out, done.err, without_carets(done.log)) == (1, "a\n", "", trace)
    assert done.ending is not None
    assert (done.ending["kind"], done.ending["code"]) == ("error", 1)
    assert without_carets(done.ending["trace"]) == trace


def without_carets(trace: str) -> str:
    """Return a traceback without the marks beneath its lines; Python 3.13 makes more of them."""
    return "".join(line for line in trace.splitlines(keepends=True) if line.strip("\n ~^"))


def test_of_a_module_too_without_frames_of_runpy(runner: Runner) -> None:
    path = runner.write("raise ValueError('boo')\n", "pack/tool.py")
    done = runner.run("-m", "pack.tool")
    assert done.err == ""
    head = f'Traceback (most recent call last):\n  File "{path}", line 1, in <module>\n'
    assert done.log.startswith(head)


def test_a_lost_peer_is_marked(runner: Runner) -> None:
    runner.write("raise RuntimeError('Connection closed by peer [127.0.0.1]:2')")
    done = runner.run("train.py")
    assert done.ending is not None
    assert done.ending["follower"] is True


def test_a_hook_of_the_scripts_own_is_called(runner: Runner) -> None:
    runner.write(
        """
        import sys
        def hook(kind, error, trace):
            print("hook", kind.__name__, error, trace.tb_frame.f_code.co_name)
        sys.excepthook = hook
        raise ValueError("boo")
        """
    )
    done = runner.run("train.py")
    assert (done.code, done.out, done.err) == (1, "hook ValueError boo <module>\n", "")
    assert done.log.endswith("ValueError: boo\n")


def test_a_syntax_error_is_reported(runner: Runner) -> None:
    path = runner.write("x = = 2\n")
    done = runner.run("train.py")
    assert (done.code, done.err) == (1, "")
    assert done.ending is not None
    assert done.ending["trace"] == done.log
    assert done.log.startswith(f'  File "{path}", line 1\n    x = = 2\n')
    assert done.log.endswith("SyntaxError: invalid syntax\n")


def test_an_error_that_can_not_be_put_in_words_is_reported(runner: Runner) -> None:
    runner.write(SCRIPTS["unprintable error"])
    done = runner.run("train.py")
    assert (done.code, done.err) == (1, "")
    assert done.log.endswith("Odd: <exception str() failed>\n")
    assert done.ending is not None


def test_an_interrupt_ends_it_as_python_does(runner: Runner) -> None:
    runner.write("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = runner.run("train.py")
    assert done.code == -signal.SIGINT
    assert done.ending is not None
    assert (done.ending["kind"], done.ending["code"]) == ("exit", 130)


def test_a_crash_leaves_the_line_that_called_it(runner: Runner) -> None:
    path = runner.write("import ctypes\ndef f():\n    ctypes.string_at(0)\nf()\n")
    done = runner.run("train.py")
    assert done.code == -signal.SIGSEGV
    assert done.ending is None
    assert "Fatal Python error: Segmentation fault" in done.log
    assert f'  File "{path}", line 3 in f\n' in done.log
    assert done.err == ""


def test_a_folder_that_has_gone_is_no_matter(runner: Runner) -> None:
    runner.write(
        f"""
        import shutil
        shutil.rmtree({str(runner.bin / "place")!r})
        raise ValueError("boo")
        """
    )
    assert runner.run("train.py") == Outcome(1, "", "")


# ---- refusals


def test_what_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target, words in (("empty", "is a folder without a __main__.py"), ("none.py", "does not exist")):
        with pytest.raises(PacelineError, match=words) as caught:
            check_script(Script(str(tmp_path / target)))
        assert caught.value.code == "PL340"
    (tmp_path / "empty" / "__main__.py").write_text("")
    check_script(Script(str(tmp_path / "empty")))
    check_script(Script("any.module", is_module=True))


def test_words_as_on_a_command_line() -> None:
    assert Script("a.py", ("-x", "1")).words == ("a.py", "-x", "1")
    assert Script("pack.a", ("-x",), is_module=True).words == ("-m", "pack.a", "-x")
