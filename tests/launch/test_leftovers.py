"""What a launch leaves in the folder for temporary files: nothing, and after a SIGKILL until the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.leftovers import ALIVE, SOCKETS, clear_abandoned, launch_folder

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
    util.get_temp_dir()  # made once per process, wherever temporary files go then
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch_folder() as folder:
        assert folder.parent == tmp_path
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_folder_goes_with_the_sockets(abandoned: Path) -> None:
    sockets, other = abandoned.with_name("pymp-a"), abandoned.with_name("pymp-b")
    for folder in (sockets, other):
        folder.mkdir()
        (folder / "listener-x").touch()
    (abandoned / SOCKETS).write_text(str(sockets))
    make_old(abandoned)
    clear_abandoned(abandoned.parent)
    assert list(abandoned.parent.iterdir()) == [other]


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


def test_what_is_named_but_not_ours_stays(abandoned: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "pymp-c"
    elsewhere.mkdir(parents=True)
    (abandoned / SOCKETS).write_text(str(elsewhere))
    make_old(abandoned)
    clear_abandoned(tmp_path)
    assert not abandoned.exists()
    assert elsewhere.exists()


def test_a_killed_launch_is_cleared_by_the_next(tmp_path: Path) -> None:
    """Its sockets, the ranks' included, are in one folder, which the launch's folder names."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    command = [sys.executable, "-c", PROGRAM, "600"]
    options: dict[str, Any] = {"env": os.environ | {"TMPDIR": str(tmp)}, "cwd": ROOT, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as launcher:
        assert launcher.stdout is not None
        where = launcher.stdout.readline().strip()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(10)
        assert launcher.stdout.read() == "", "read to the end: the ranks have ended"
    [left] = tmp.glob("paceline-launch-*")
    assert list(tmp.glob("pymp-*")) == [Path(where)]
    make_old(left)
    done = subprocess.run([*command[:-1], "0"], capture_output=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp.iterdir() if not path.name.startswith("torchinductor")] == []


PROGRAM = """
import sys
from paceline.launch.local import launch
from tests.launch.jobs import tell_where_sockets_go
launch(tell_where_sockets_go, nproc=1, args=(float(sys.argv[1]),))
"""
