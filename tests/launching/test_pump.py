"""The process that carries what ranks print to the terminal and to their logs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.launching.processes.streams import Pump, open_streams


@contextmanager
def screen_to(path: Path) -> Iterator[Pump]:
    """Start a pump whose terminal is a file: it takes over this process's stdout when it is started."""
    saved = os.dup(1)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    try:
        pump = Pump()
    finally:
        os.dup2(saved, 1)
        for fd in (saved, target):
            os.close(fd)
    try:
        yield pump
    finally:
        pump.close()


def test_the_terminal_gets_all_and_the_log_only_what_stays(tmp_path: Path) -> None:
    log, screen = tmp_path / "log", tmp_path / "screen"
    text = b"plain\n\x1b[31mred\x1b[0m\nstep 1\rstep 2\rstep 3\r\nno end"
    with screen_to(screen) as pump:
        out, err = open_streams(pump, "", "", str(log), shows=True, persists=False)
        os.write(out, text)
        for fd in (out, err):
            os.close(fd)
        pump.drain()
        assert screen.read_bytes() == text
        assert log.read_bytes() == b"plain\nred\nstep 3\nno end\n"


def test_lines_of_two_ranks_stay_whole(tmp_path: Path) -> None:
    screen = tmp_path / "screen"
    with screen_to(screen) as pump:
        pairs = [
            open_streams(pump, "", "", str(tmp_path / f"log{n}"), shows=True, persists=False) for n in "ab"
        ]
        for part in (b"one ", b"two ", b"three\n") * 20:  # as an unbuffered print writes them
            for out, _ in pairs:
                os.write(out, part)
        for pair in pairs:
            for fd in pair:
                os.close(fd)
        pump.drain()
    assert screen.read_bytes() == b"one two three\n" * 40


def test_a_question_without_an_end_of_line_is_shown(tmp_path: Path) -> None:
    screen = tmp_path / "screen"
    with screen_to(screen) as pump:
        out, err = open_streams(pump, "", "", str(tmp_path / "log"), shows=True, persists=False)
        os.write(out, b"continue? ")
        end = time.monotonic() + 5
        while screen.read_bytes() != b"continue? " and time.monotonic() < end:
            time.sleep(0.01)
        assert screen.read_bytes() == b"continue? "
        for fd in (out, err):
            os.close(fd)


def test_what_is_not_shown_is_logged(tmp_path: Path) -> None:
    screen, log = tmp_path / "screen", tmp_path / "log"
    with screen_to(screen) as pump:
        out, err = open_streams(pump, "", os.devnull, str(log), shows=False, persists=False)
        os.write(out, b"a\n")
        os.write(err, b"b\n")
        for fd in (out, err):
            os.close(fd)
        pump.drain()
    assert screen.read_bytes() == b""
    assert sorted(log.read_bytes().splitlines()) == [b"a", b"b"]


@pytest.mark.parametrize("text", [b"a line\n", b"no end"])
def test_a_full_disk_is_reported_and_ends_nothing(text: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with screen_to(Path("/dev/full")) as pump:
        out, err = open_streams(pump, "", "", str(log), shows=True, persists=False)
        os.write(out, text)
        pump.drain()
        time.sleep(0.2)
        os.write(out, b", more\n")
        for fd in (out, err):
            os.close(fd)
        pump.drain()
        assert pump.lost is not None
        error, to = pump.lost
        assert (error.errno, to) == (errno.ENOSPC, 1)
    assert log.read_bytes() == text + b", more\n"


READER_GONE = """
import os, sys, time
from paceline.launching.processes.streams import Pump, open_streams
pump = Pump()
out, err = open_streams(pump, "", "", sys.argv[1], shows=True, persists=sys.argv[2] == "True")
os.write(out, b"first\\n")
sys.stdin.readline()  # the reader of our stdout has gone now
try:
    for _ in range(100):
        os.write(out, b"more\\n")
        time.sleep(0.02)
except BrokenPipeError:
    print("noticed", file=sys.stderr)
os.close(out)
os.close(err)
pump.drain()
pump.close()
"""


@pytest.mark.parametrize("persists", [False, True])
def test_a_reader_that_goes_is_noticed_by_a_script_and_not_by_a_training(
    persists: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", READER_GONE, str(log), str(persists)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stderr.read()
        assert process.wait(30) == 0
    assert ("noticed" in said) is not persists, said
    assert (log.read_text() == "first\n" + "more\n" * 100) is persists


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_streams(None, str(tmp_path / "no" / "file"), "", "", shows=True, persists=False)
