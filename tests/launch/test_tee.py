"""The copier between rank 0, the terminal and the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paceline.launch.tee


def test_terminal_gets_all_and_the_log_only_what_stays(tmp_path: Path) -> None:
    log, screen = tmp_path / "log", tmp_path / "screen"
    read, write = os.pipe()
    target = os.open(screen, os.O_WRONLY | os.O_CREAT)
    script = paceline.launch.tee.__file__
    with subprocess.Popen(
        [sys.executable, "-I", "-S", script, str(log), f"{read}:{target}"], pass_fds=(read, target)
    ) as process:
        os.close(read)
        text = b"plain\n\x1b[31mred\x1b[0m\nstep 1\rstep 2\rstep 3\r\nno end"
        os.write(write, text)
        os.close(write)
        assert process.wait(20) == 0
    os.close(target)
    assert screen.read_bytes() == text
    assert log.read_bytes() == b"plain\nred\nstep 3\nno end\n"
