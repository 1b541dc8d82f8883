"""Ending processes with all that they have started."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.launching.processes.family import end_family, send_to_group

# A resource tracker of multiprocessing as it looks from outside: deaf to TERM and INT.
_TRACKER = (
    "import os, signal, sys, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    "sys.stdout.write('t'); sys.stdout.flush(); time.sleep({seconds})"
)
# Its name is in its command line, as in `python -c 'from multiprocessing.resource_tracker import ...'`.
_CLEARER = "# multiprocessing.resource_tracker\n" + _TRACKER


def start_parent(body: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own that adopts orphans, with `start` for children and `tell` for their numbers."""
    text = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        import psutil
        from paceline.launching.processes.family import adopt_orphans, end_descendants
        CLEARER = {_CLEARER!r}
        def start(*words, **options):
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, **options)
        def start_clearer(seconds):
            # From the module's own line on; it writes when its handlers stand.
            child = start(sys.executable, "-c", CLEARER.format(seconds=seconds), stdout=subprocess.PIPE)
            child.stdout.read(1)
            return child
        def reap():
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        def lives(pid):
            return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        adopt_orphans()
        """
    ) + textwrap.dedent(body)
    path = folder / "parent.py"
    path.write_text(text)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


def run_parent(body: str, folder: Path) -> list[str]:
    process = start_parent(body, folder)
    try:
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    return out.split()


def test_children_and_their_children_end(tmp_path: Path) -> None:
    body = """
        child = start("sh", "-c", "sleep 50 & sleep 50 & wait")
        while len(psutil.Process().children(recursive=True)) < 3:
            time.sleep(0.01)
        pids = [p.pid for p in psutil.Process().children(recursive=True)]
        print(end_descendants(reap), sum(map(lives, pids)))
    """
    assert run_parent(body, tmp_path) == ["3", "0"]


def test_one_that_has_left_its_session_and_its_parent_ends(tmp_path: Path) -> None:
    body = """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.write(writing, b"%d" % os.getpid())
            os.execvp("sleep", ["sleep", "50"])
        os.waitpid(child, 0)
        daemon = int(os.read(reading, 20))
        assert lives(daemon) and os.getpgid(daemon) != os.getpgrp()
        print(end_descendants(reap), lives(daemon))
    """
    assert run_parent(body, tmp_path) == ["1", "False"]


def test_one_that_is_deaf_to_signals_ends(tmp_path: Path) -> None:
    body = """
        child = start("sh", "-c", "trap '' TERM INT HUP; echo ready; sleep 50", stdout=subprocess.PIPE)
        child.stdout.readline()
        print(end_descendants(reap) >= 1, lives(child.pid))
    """
    assert run_parent(body, tmp_path) == ["True", "False"]


def test_who_clears_up_may_finish(tmp_path: Path) -> None:
    body = """
        clearer = start_clearer(0.7)
        other = start("sleep", "50")
        began = time.monotonic()
        killed = end_descendants(lambda: None)
        took = time.monotonic() - began
        print(killed, clearer.wait(), other.wait(), 0.2 < took < 3)
    """
    assert run_parent(body, tmp_path) == ["1", "0", "-9", "True"]


def test_who_clears_up_too_long_ends_last(tmp_path: Path) -> None:
    body = """
        clearer = start_clearer(50)
        began = time.monotonic()
        killed = end_descendants(lambda: None)
        took = time.monotonic() - began
        print(killed, clearer.wait(), 2.5 < took < 8)
    """
    assert run_parent(body, tmp_path) == ["0", "-9", "True"]


def test_those_that_are_spared_live(tmp_path: Path) -> None:
    body = """
        spared, other = start("sleep", "50"), start("sleep", "50")
        print(end_descendants(lambda: None, {spared.pid}), lives(spared.pid), other.wait())
        spared.kill()
    """
    assert run_parent(body, tmp_path) == ["1", "True", "-9"]


def test_nobody_there(tmp_path: Path) -> None:
    body = """
        began = time.monotonic()
        print(end_descendants(reap), time.monotonic() - began < 1)
    """
    assert run_parent(body, tmp_path) == ["0", "True"]


# ---- in this process


LEADER = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
child = subprocess.Popen(["sleep", "50"])
clearer = subprocess.Popen([sys.executable, "-c", {_CLEARER.format(seconds=50)!r}], stdout=subprocess.PIPE)
clearer.stdout.read(1)
print(child.pid, clearer.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A process group: its leader, a child of it, and one that clears up."""
    path = tmp_path / "leader.py"  # so that the leader's own command line does not name a tracker
    path.write_text(LEADER)
    leader = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    child, clearer = (psutil.Process(int(pid)) for pid in leader.stdout.readline().split())
    yield leader, child, clearer
    for process in (child, clearer):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    leader.kill()
    leader.wait()
    leader.stdout.close()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_end(process: psutil.Process) -> bool:
    end = time.monotonic() + 5
    while lives(process) and time.monotonic() < end:
        time.sleep(0.01)
    return not lives(process)


Group = tuple[subprocess.Popen[str], psutil.Process, psutil.Process]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_that_would_end_who_clears_up_spares_it(number: signal.Signals, group: Group) -> None:
    leader, child, clearer = group
    send_to_group(leader.pid, number)
    assert leader.wait(5) == -number
    assert await_end(child)
    time.sleep(0.1)
    assert lives(clearer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_others_go_to_the_whole_group(number: signal.Signals, group: Group) -> None:
    leader, child, clearer = group
    send_to_group(leader.pid, number)
    assert leader.wait(5) == -number
    assert await_end(child)
    assert lives(clearer)


def test_a_family_ends_but_for_who_clears_up(group: Group) -> None:
    leader, child, clearer = group
    end_family(leader.pid)
    assert leader.wait(5) == -signal.SIGKILL
    assert await_end(child)
    assert lives(clearer)


def test_groups_and_processes_that_have_gone_are_harmless() -> None:
    gone = subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    send_to_group(gone.pid, signal.SIGTERM)
    send_to_group(gone.pid, signal.SIGHUP)
    end_family(gone.pid)


def test_other_groups_are_left_alone(group: Group) -> None:
    other = subprocess.Popen(["sleep", "50"], start_new_session=True)
    send_to_group(group[0].pid, signal.SIGHUP)
    assert group[0].wait(5) == -signal.SIGHUP
    assert other.poll() is None
    other.kill()
    other.wait()
