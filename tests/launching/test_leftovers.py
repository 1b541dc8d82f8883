"""A launch leaves nothing in the folder for temporary files, after a SIGKILL once the next one has run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline.launching.processes.folder import ALIVE, SOCKETS, clear_abandoned, launch_folder

ROOT = Path(__file__).parents[2]


def make_old(folder: Path) -> None:
    long_ago_s = time.time() - 60
    os.utime(folder, (long_ago_s, long_ago_s))


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    folder = tmp_path / "paceline-launch-gone"
    folder.mkdir()
    os.mkfifo(folder / ALIVE)
    (folder / "began-0").write_text("1")
    make_old(folder)
    return folder


def test_a_folder_is_there_for_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch_folder() as folder:
        assert folder.parent == tmp_path
        assert sorted(tmp_path.iterdir()) == sorted([folder, (folder / SOCKETS).readlink()])
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_folder_goes_with_its_sockets(abandoned: Path) -> None:
    sockets, other = abandoned.with_name("pymp-pl-a"), abandoned.with_name("pymp-b")
    for folder in (sockets, other):
        folder.mkdir()
        (folder / "listener-x").touch()
    (abandoned / SOCKETS).symlink_to(sockets)
    make_old(abandoned)
    clear_abandoned(abandoned.parent)
    assert list(abandoned.parent.iterdir()) == [other]


@pytest.mark.parametrize("where", ["elsewhere/pymp-pl-c", "other"])
def test_what_the_link_should_not_lead_to_stays(where: str, abandoned: Path, tmp_path: Path) -> None:
    (tmp_path / where).mkdir(parents=True)
    (abandoned / SOCKETS).symlink_to(tmp_path / where)
    make_old(abandoned)
    clear_abandoned(tmp_path)
    assert not abandoned.exists()
    assert (tmp_path / where).exists()


@pytest.mark.parametrize("reader", ["launcher", "rank"])
def test_one_with_a_living_process_stays(reader: str, abandoned: Path) -> None:
    fd = os.open(abandoned / ALIVE, os.O_RDWR if reader == "launcher" else os.O_RDONLY | os.O_NONBLOCK)
    clear_abandoned(abandoned.parent)
    assert abandoned.exists()
    os.close(fd)
    clear_abandoned(abandoned.parent)
    assert not abandoned.exists()


def test_one_that_is_just_being_made_stays(abandoned: Path) -> None:
    (abandoned / ALIVE).unlink()
    clear_abandoned(abandoned.parent)
    assert abandoned.exists(), "unlinking was a change, so it is young"
    make_old(abandoned)
    clear_abandoned(abandoned.parent)
    assert not abandoned.exists()


def test_a_killed_launch_is_cleared_by_its_keeper(tmp_path: Path) -> None:
    tmp = tmp_path
    with start_launch(tmp) as launcher:
        launcher.send_signal(signal.SIGKILL)
        wait_until_ranks_are_gone(launcher)
        wait_until(lambda: list_left(tmp) == [])


def test_where_the_keeper_was_killed_too_the_next_launch_clears(tmp_path: Path) -> None:
    """The sockets of ranks and loader workers go with the launch's folder."""
    tmp = tmp_path
    with start_launch(tmp) as launcher:
        [keeper] = [
            child
            for child in psutil.Process(launcher.pid).children()
            if "keeper" in " ".join(child.cmdline())
        ]
        for pid in (launcher.pid, keeper.pid):
            os.kill(pid, signal.SIGKILL)
        wait_until_ranks_are_gone(launcher)
    [left] = [path for path in list_left(tmp) if path.name.startswith("paceline-launch-")]
    make_old(left)
    clear_abandoned(tmp)
    assert list_left(tmp) == []


PROGRAM = """
from paceline.launching.local import launch
from tests.launching.jobs import tell_where_sockets_go
launch(tell_where_sockets_go, nproc=1, args=(600,))
"""


def start_launch(tmp: Path) -> subprocess.Popen[str]:
    """Return a launcher whose rank has printed where multiprocessing's sockets are."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TMPDIR": str(tmp)},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    where = Path(launcher.stdout.readline().strip())
    if where.parent != tmp:
        launcher.kill()
    assert where.parent == tmp
    return launcher


def wait_until_ranks_are_gone(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    launcher.wait(10)
    assert launcher.stdout.read() == "", "read to the end: all who could write have ended"


def list_left(tmp: Path) -> list[Path]:
    return [path for path in tmp.iterdir() if not path.name.startswith("torchinductor")]


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_done() and time.monotonic() < end:
        time.sleep(0.05)
    assert is_done()
