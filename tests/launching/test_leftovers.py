"""A launch leaves nothing in the folder for temporary files, also after a SIGKILL of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.launching.processes.folder import SOCKETS, launch_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_is_there_for_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch_folder() as folder:
        assert folder.parent == tmp_path
        assert sorted(tmp_path.iterdir()) == sorted([folder, (folder / SOCKETS).readlink()])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_launch_is_cleared_by_its_keeper(tmp_path: Path) -> None:
    tmp = tmp_path
    with start_launch(tmp) as launcher:
        launcher.send_signal(signal.SIGKILL)
        wait_until_ranks_are_gone(launcher)
        wait_until(lambda: list_left(tmp) == [])


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


def test_a_folder_with_too_long_a_path_needs_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with launch_folder() as folder:
        assert folder.parent in (Path("/tmp"), Path("/var/tmp"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PacelineError, match=r"neither /tmp nor /var/tmp.*\[PL606\]"), launch_folder():
        pass
