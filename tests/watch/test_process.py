"""The view of real processes from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.launching.processes.family import end_family
from paceline.launching.watcher import WatchedRank
from paceline.watch.launcher.clock import BUSY_BYTES_PER_S, BUSY_SHARE
from paceline.watch.launcher.process import ProcessSampler
from paceline.watch.protocol.report import WATCHING_THREAD

Start = Callable[[str], WatchedRank]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process that runs some code; ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> WatchedRank:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return WatchedRank(0, 1, Path(), started[-1].pid, None)

    yield begin
    for process in started:
        end_family(process.pid)
        process.wait()


def test_who_computes_is_distinguished_from_who_waits(start: Start) -> None:
    busy = start("while True: pass")
    idle = start("import time; time.sleep(60)")
    parent = start(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=100)"
    )
    sampler = ProcessSampler("here")
    shares = {watched.pid: 0.0 for watched in (busy, idle, parent)}
    ends_s = time.monotonic() + 60  # on a busy machine each gets a tenth of a core only at times
    while min(shares[busy.pid], shares[parent.pid]) < BUSY_SHARE and time.monotonic() < ends_s:
        for watched in (busy, idle, parent):
            shares[watched.pid] = max(shares[watched.pid], sampler.sample([watched])[0].cpu_share)
        time.sleep(1.0)
    assert shares[busy.pid] > BUSY_SHARE
    assert shares[parent.pid] > BUSY_SHARE, "what a rank has started works for it"
    assert sampler.sample([idle])[0].cpu_share < BUSY_SHARE
    once, again = (sampler.sample([busy])[0].cpu_share for _ in range(2))
    assert once == again, "a moment is too short to tell"
    time.sleep(0.6)
    shares = [sampler.sample([busy], is_kept=False)[0].cpu_share for _ in range(3)]
    assert min(shares) < max(shares), "each one tells what came since the last look"


def test_a_stopped_process_is_reported(start: Start) -> None:
    watched = start("import time; time.sleep(60)")
    sampler = ProcessSampler("here")
    time.sleep(0.2)
    assert sampler.sample([watched])[0].state in ("sleeping", "running")
    os.kill(watched.pid, signal.SIGSTOP)
    time.sleep(0.2)
    assert sampler.sample([watched])[0].state == "stopped"


def test_an_end_has_its_exit_code(start: Start) -> None:
    watched = start("raise SystemExit(3)")
    assert ProcessSampler("here").sample([WatchedRank(0, 1, Path(), watched.pid, 3)])[0].exit_code == 3
    assert ProcessSampler("here").sample([WatchedRank(0, 1, Path(), 2**22 + 1, None)])[0].state == "ended"


def test_who_writes_is_distinguished_from_who_waits(start: Start, tmp_path: Path) -> None:
    writes = (
        "import time\nwith open(%r, 'wb', 0) as f:\n    while True: f.write(bytes(9000)); time.sleep(0.2)"
    )
    writer = start(writes % str(tmp_path / "file"))
    idle = start("import time; time.sleep(60)")
    sampler = ProcessSampler("here")
    ends_s, rates = time.monotonic() + 15, [0.0, 0.0]
    while rates[0] < BUSY_BYTES_PER_S and time.monotonic() < ends_s:
        rates = [sampler.sample([watched])[0].io_rate for watched in (writer, idle)]
        time.sleep(1.0)
    assert rates[0] > BUSY_BYTES_PER_S
    time.sleep(1.0)
    assert sampler.sample([idle])[0].io_rate < BUSY_BYTES_PER_S


def test_the_io_of_the_watching_thread_is_not_the_ranks(start: Start) -> None:
    code = (
        "import threading, time\nfrom pathlib import Path\n"
        "def watch():\n"
        "    Path(f'/proc/self/task/{threading.get_native_id()}/comm').write_text(%r)\n"
        "    while True: Path('/proc/meminfo').read_text(); time.sleep(0.02)\n"
        "threading.Thread(target=watch).start()"
    )
    watched, other = start(code % WATCHING_THREAD), start(code % "loader")
    sampler = ProcessSampler("here")
    ends_s, rate = time.monotonic() + 30, 0.0
    while rate < BUSY_BYTES_PER_S and time.monotonic() < ends_s:
        rate = sampler.sample([other])[0].io_rate
        sampler.sample([watched])
        time.sleep(1.0)
    assert rate > BUSY_BYTES_PER_S
    time.sleep(1.0)
    assert sampler.sample([watched])[0].io_rate < BUSY_BYTES_PER_S
