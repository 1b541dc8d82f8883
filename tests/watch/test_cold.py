"""Ranks that start cold: watched as the others are, and to their script it is as under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.launching.processes.folder import SOCKETS
from paceline.launching.rank import cold
from paceline.launching.rank.cold import let_in
from paceline.launching.watcher import SOCKET
from paceline.watch.launcher.watcher import RankWatcher
from tests.launching.launched import Launched, paceline_run
from tests.launching.test_script import SCRIPTS, Runner, lay_out
from tests.watch.listener import Listener

pytestmark = pytest.mark.timeout(240)
_END_S = 120.0
COLD = cold.__file__


# ---- a Python of its own, beside one that torchrun would have started


class ColdRunner(Runner):
    """Runs scripts as ranks that start cold, with somebody who listens."""

    def __init__(self, folder: Path, watch: str = RankWatcher.entry) -> None:
        super().__init__(folder)
        self.launch_folder = folder / "launch"
        self.launch_folder.mkdir()
        self.watch = watch

    def _open_ours(self, words: Sequence[str], place: str = "") -> subprocess.Popen[str]:
        folder = str(self.launch_folder)
        return self._open(let_in((sys.executable, "-u", *words), self.watch, 0, folder, folder)[1:])


@pytest.fixture
def runner(tmp_path: Path) -> ColdRunner:
    return ColdRunner(tmp_path)


@pytest.fixture
def listener(runner: ColdRunner) -> Iterator[Listener]:
    with Listener(runner.launch_folder, 1) as listening:
        (runner.launch_folder / SOCKET).symlink_to(listening.socket)
        yield listening


@pytest.mark.parametrize("way", ["dots", "link", "compiled", "-m", "-m package", "folder", "archive"])
def test_a_script_sees_what_python_shows_it(way: str, runner: ColdRunner, listener: Listener) -> None:
    done = runner.compare(*lay_out(runner, way), "--lr", "1", "-m", "")
    assert done.code == 0, done.err
    assert '"--lr"' in done.out
    assert listener.wait_for_beats(0, 1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_what_it_leaves_under_python(
    name: str, runner: ColdRunner, listener: Listener
) -> None:
    runner.write(SCRIPTS[name])
    runner.compare("train.py")
    assert listener.wait_for_beats(0, 1)


LOOK = """
import faulthandler, gc, locale, os, signal, sys, threading, warnings
stacks = [s for s in range(1, 65) if signal.getsignal(s) not in (signal.SIG_DFL, signal.SIG_IGN)]
descriptors = [fd for fd in (0, 1, 2) if os.get_inheritable(fd)]
for seen in (
    sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions, sys.executable,
    sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.getrecursionlimit(),
    sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), sys.dont_write_bytecode, sys.pycache_prefix,
    [getattr(sys, name) is getattr(sys, f"__{name}__") for name in ("stdin", "stdout", "stderr")],
    (sys.stdin.encoding, sys.stdin.errors, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors),
    locale.setlocale(locale.LC_ALL), dict(os.environ), os.getcwd(), os.umask(0), stacks, descriptors,
    faulthandler.is_enabled(), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(),
    threading.active_count(), threading.current_thread().name, threading.main_thread().name,
    threading.main_thread().ident == threading.get_ident(), __debug__,
    [str(f) for f in warnings.filters], [type(hook).__name__ for hook in sys.path_hooks],
    sorted(name for name in sys.modules if name.startswith(("torch", "numpy", "__m"))),
):
    print(seen)
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONPATH": str(Path(COLD).parents[2])},
        {"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1", "PYTHONUTF8": "1"},
        {"PYTHONIOENCODING": "latin-1:replace", "PYTHONFAULTHANDLER": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    ],
    ids=lambda env: " ".join(env) or "none",
)
def test_the_interpreter_is_as_python_starts_it(
    env: dict[str, str], runner: ColdRunner, listener: Listener
) -> None:
    runner.env = env
    runner.write(LOOK)
    assert runner.compare("train.py", "-x").code == 0
    assert listener.wait_for_beats(0, 1)


def test_only_the_standard_library_is_loaded_before_the_script(
    runner: ColdRunner, listener: Listener
) -> None:
    runner.write("import sys; print(*{name.partition('.')[0] for name in sys.modules})")
    running = [runner._open(["-u", "train.py"]), runner._open_ours(["train.py"])]
    plain, ours = (set(process.communicate("", timeout=60)[0].split()) for process in running)
    assert listener.wait_for_beats(0, 1)
    others = ours - plain - set(sys.stdlib_module_names)
    assert {name for name in others if not name.startswith("_sysconfigdata")} == {"paceline"}


def test_multiprocessing_has_its_sockets_where_the_launch_removes_them(
    runner: ColdRunner, listener: Listener, tmp_path: Path
) -> None:
    (tmp_path / "pymp-pl-x").mkdir()
    (runner.launch_folder / SOCKETS).symlink_to(tmp_path / "pymp-pl-x")
    runner.write("from multiprocessing import util; print(util.get_temp_dir())")
    output, _ = runner._open_ours(["train.py"]).communicate("", timeout=60)
    assert output.strip() == str(tmp_path / "pymp-pl-x")
    assert listener.wait_for_beats(0, 1)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_find_functions_of_main(method: str, runner: ColdRunner, listener: Listener) -> None:
    runner.write(
        f"""
        import multiprocessing, sys
        def square(x, queue):
            queue.put((x * x, __name__ in ("__main__", "__mp_main__"), sys.argv, sys.orig_argv[1:2]))
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            child = context.Process(target=square, args=(7, queue))
            child.start()
            print(queue.get(timeout=30))
            child.join()
            print(child.exitcode)
        """
    )
    assert runner.compare("train.py", "word").out.endswith("\n0\n")
    assert listener.wait_for_beats(0, 1)


# What is loaded for the watch; a module of the user's may have its name.
TAKEN = ("json", "paceline", "select", "selectors", "inspect", "pickle", "token", "threading", "socket")


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_modules_beside_the_script_come_first(
    name: str, is_module: bool, runner: ColdRunner, listener: Listener
) -> None:
    text = "word = 'own'\ndef _shutdown(): pass\n"  # Python calls it of `threading`
    runner.write(text, f"{name}/__init__.py" if name in ("json", "paceline") else f"{name}.py")
    runner.write(f"""
        import sys, {name}
        print(getattr({name}, "word", "standard"), {name}.__spec__.origin)
        print([name for name in sys.modules if name.startswith("{name}.")])
    """)
    assert runner.compare(*(["-m", "train"] if is_module else ["train.py"])).code == 0
    assert listener.wait_for_beats(0, 1)


# ---- where nobody can be let in


def test_a_watch_that_can_not_be_loaded_keeps_nobody_from_running(tmp_path: Path) -> None:
    for number, watch in enumerate(
        ("paceline.nowhere:begin", "paceline.watch.rank.reporter:nothing", "json:loads")
    ):
        (tmp_path / str(number)).mkdir()
        runner = ColdRunner(tmp_path / str(number), watch)
        runner.write(LOOK + "print(len(sys.modules), open('/proc/self/cmdline').read().split(chr(0))[1:])")
        assert runner.compare("train.py", "-x").code == 0


def test_another_python_is_started_as_it_is() -> None:
    for command in (("/usr/bin/python3", "-u", "train.py"), ("numactl", sys.executable, "-u", "train.py")):
        assert let_in(command, RankWatcher.entry, 0, "/launch", "/attempt") == command


TELL_SELF = """
import json, sys
command = open("/proc/self/cmdline").read().split(chr(0))[:-1]
print(json.dumps([sys.executable, command, "paceline" in sys.modules]))
"""


def launch(
    folder: Path, text: str, *words: str, name: str = "train.py", **env: str | None
) -> tuple[int, str]:
    """Run a script as one rank; return exit code and output."""
    path = folder / name
    path.write_text(text)
    with Launched(folder, paceline_run(*words, str(path)), env=env) as job:
        code = job.wait(_END_S)
        return code, job.text


def test_without_a_watch_a_cold_rank_is_started_as_torchrun_starts_it(tmp_path: Path) -> None:
    code, text = launch(tmp_path, TELL_SELF, "--cold", "--no-watch")
    assert code == 0
    assert json.loads(text) == [sys.executable, [sys.executable, "-u", str(tmp_path / "train.py")], False]


def test_another_python_without_this_package_runs_the_script(tmp_path: Path) -> None:
    other = sys._base_executable  # type: ignore[attr-defined]
    code, text = launch(tmp_path, TELL_SELF, PYTHON_EXEC=other)
    assert code == 0, text
    assert json.loads(text.splitlines()[-1]) == [other, [other, "-u", str(tmp_path / "train.py")], False]


# ---- under `paceline run`

WAITER = """
import os
{first}
import time
import torch
import torch.distributed as dist


def meet(rank):
    tensor = torch.ones(4)
    if rank == 1:
        time.sleep(600)  # CAUSE
    dist.all_reduce(tensor)  # WAITS


def main():
    print("started by", open("/proc/self/cmdline").read().split(chr(0))[2], flush=True)
    dist.init_process_group("gloo")
    meet(dist.get_rank())


main()
"""


@pytest.mark.parametrize(
    ("first", "flags"),
    [
        ("", ["--cold"]),
        ("", ["--cold", "-m"]),
        ("os.environ['MKL_NUM_THREADS'] = os.environ['OMP_NUM_THREADS'] = '2'", []),
        ("os.environ['OMP_NUM_' + 'THREADS'] = '2'", []),
    ],
    ids=["script", "module", "sets what torch reads", "started over"],
)
def test_a_hang_gets_the_verdict_that_it_gets_warm(first: str, flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "work" / "pack" / "wait.py"
    path.parent.mkdir(parents=True)
    path.write_text(WAITER.format(first=first))
    lines = path.read_text().splitlines()
    cause, waits = (next(n for n, line in enumerate(lines, 1) if mark in line) for mark in ("CAUSE", "WAITS"))
    target = "pack.wait" if "-m" in flags else str(path)
    command = paceline_run("--nproc-per-node", "2", "--hang-after", "3", *flags, target)
    with Launched(tmp_path, command) as job:
        assert job.wait(_END_S) == 1
        assert job.text.count(f"started by {COLD}\n") == 2
        headline = next(line for line in job.text.splitlines() if "[PL800]" in line)
        assert headline.startswith("paceline: rank 1 never reached all_reduce number 1 of world")
        assert f"wait.py:{waits} in meet" in headline
        assert f"wait.py:{cause} in meet" in headline
        assert "rank 0 waits in all_reduce number 1 of world (float32 [4], sum)" in job.text
        assert not job.find_left(5)


FAILING = """
def load(path):
    with open(path) as file:
        return file.read()
try:
    load("nowhere.txt")
except OSError as error:
    raise RuntimeError("no data") from error
"""


def launch_both(folder: Path, text: str) -> list[tuple[int, list[str]]]:
    """Exit codes and lines of a script that fails on a cold rank, with and without a watch."""
    told = []
    for flags in (["--cold"], ["--cold", "--no-watch"]):
        code, output = launch(folder, text, *flags)
        told.append((code, re.sub(r"logs/\S+", "logs/", output).splitlines()))
    return told


def test_an_error_is_reported_as_it_is_without_a_watch(tmp_path: Path) -> None:
    watched, unwatched = launch_both(tmp_path, FAILING)
    assert watched == unwatched
    assert watched[0] == 1
    assert watched[1].count("RuntimeError: no data") == 2  # by the rank, and by the launcher


def test_an_exit_is_reported_with_its_line(tmp_path: Path) -> None:
    (code, watched), (plain_code, unwatched) = launch_both(tmp_path, "raise SystemExit(3)")
    assert code == plain_code == 1
    assert [line for line in watched if line in unwatched] == unwatched
    assert "exited with code 3" in watched[0]
    assert "train.py:1" in "".join(watched)
