"""Waiting for gloo's threads: those that still need Python's lock are awaited, those that wait are not."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from paceline.torch_seams.gloo_threads import await_gloo_threads, schedule_loops_as_batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
_SET_NAME = 15  # prctl's PR_SET_NAME


@contextmanager
def gloo_thread(pause_s: float, name: bytes = b"pt_gloo_runloop") -> Iterator[threading.Event]:
    """Run a thread with a name of gloo's that wakes once per pause; yield what ends it."""
    ended, named = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, name, 0, 0, 0)
        named.set()
        while not ended.wait(pause_s):
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert named.wait(10)
    try:
        yield ended
    finally:
        ended.set()
        thread.join()


def test_a_thread_that_waits_is_not_awaited() -> None:
    with gloo_thread(600):
        assert await_gloo_threads(60)


def test_only_event_loops_become_batch_work() -> None:
    def count_batch_work() -> int:
        found = 0
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # threads of earlier tests may end meanwhile
                found += os.sched_getscheduler(int(task)) == os.SCHED_BATCH
        return found

    before = count_batch_work()
    with gloo_thread(600, b"gloo_tcp_loop"), gloo_thread(600):
        assert schedule_loops_as_batch() == 1
        assert count_batch_work() == before + 1


def test_the_loops_of_a_started_world_are_batch_work(tmp_path: Path) -> None:
    """Of two ranks: one alone connects to nobody, so its loop may have no name yet when `start` looks."""
    (tmp_path / "script.py").write_text(STARTED)
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"gloo_tcp_loop has policy (\d)", done.stdout)
    if not found and torch.__version__ < (2, 13):
        pytest.skip("this torch does not name gloo's event loop")
    assert found == [str(os.SCHED_BATCH)] * 2, done.stdout


STARTED = """
import os
import paceline
with paceline.start(device="cpu"):
    for task in os.listdir("/proc/self/task"):
        name = open(f"/proc/self/task/{task}/comm").read().strip()
        if name == "gloo_tcp_loop":
            print(name, "has policy", os.sched_getscheduler(int(task)), flush=True)
"""


def test_a_thread_that_works_is_awaited() -> None:
    with gloo_thread(0.002) as ended:
        assert not await_gloo_threads(0.2)
        threading.Timer(0.3, ended.set).start()
        began = time.monotonic()
        assert await_gloo_threads(60)
        assert time.monotonic() - began > 0.25


SCRIPT = """
import os, subprocess, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
core = min(os.sched_getaffinity(0))
for task in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(task, {core})
    if open(f"/proc/self/task/{task}/comm").read().strip() == "pt_gloo_runloop":
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
busy = "import time; until = time.monotonic() + 4\\nwhile time.monotonic() < until: pass"
other = subprocess.Popen([sys.executable, "-c", busy])
model(torch.ones(2, 4)).sum().backward()
dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
del model
print("the model is gone", flush=True)
other.wait()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_script_ends_although_gloos_thread_rarely_gets_a_core(tmp_path: Path) -> None:
    """Without waiting for the thread, the reducer's destructor joins it while it holds Python's lock."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "the model is gone" in done.stdout + done.stderr
