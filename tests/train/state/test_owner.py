"""The owner of a run's folder, and whether its launcher is still alive."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.train.state.owner import Owner, describe_owner, read_owner


def test_an_owner_is_read_as_it_was_written(tmp_path: Path) -> None:
    owner = describe_owner(None)
    assert owner.launcher_pid == os.getppid()
    assert owner.launcher_start_s == psutil.Process(os.getppid()).create_time()
    (tmp_path / "lock").write_text(owner.dump())
    assert read_owner(tmp_path / "lock") == owner
    assert not owner.has_lost_launcher()


@pytest.mark.parametrize("text", ["", "12\n", '{"pid": 3}', "[1]", '{"a', None])
def test_what_is_not_an_owner_is_none(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "lock").write_text(text)
    assert read_owner(tmp_path / "lock") is None


def test_a_launcher_that_ended_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as launcher:
        owner = describe_owner(launcher.pid)
        assert not owner.has_lost_launcher()
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has waited for it
        assert owner.has_lost_launcher()
        launcher.wait(10)
        assert owner.has_lost_launcher()
    assert describe_owner(launcher.pid) == replace(owner, launcher_start_s=None)
    assert describe_owner(launcher.pid).has_lost_launcher()


def test_a_number_that_was_used_again_is_another_process() -> None:
    owner = describe_owner(os.getpid())
    assert owner.launcher_start_s is not None
    assert replace(owner, launcher_start_s=owner.launcher_start_s - 60).has_lost_launcher()
    assert not replace(owner, launcher_start_s=owner.launcher_start_s + 0.5).has_lost_launcher()


def test_of_another_machine_nothing_is_known() -> None:
    owner = Owner("elsewhere", 1, 2**22 + 1, 5.0)
    assert not owner.has_lost_launcher()
    assert replace(owner, host=socket.gethostname()).has_lost_launcher()
