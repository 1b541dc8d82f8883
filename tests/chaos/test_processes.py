"""A start that waits is distinguished from one that is slow."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.chaos.processes import Activity
from tests.chaos.setting import MARK


@pytest.mark.parametrize(
    ("code", "is_idle"), [("import time; time.sleep(60)", True), ("while True: pass", False)]
)
def test_idle_processes_are_distinguished(code: str, is_idle: bool) -> None:
    mark = f"idle-{os.getpid()}-{is_idle}"
    with subprocess.Popen([sys.executable, "-S", "-c", code], env=os.environ | {MARK: mark}) as process:
        try:
            activity = Activity(mark, every_s=0.5)
            ends_s = time.monotonic() + 20
            while activity.measure_idle_s() < 2 and time.monotonic() < ends_s - (0 if is_idle else 16):
                time.sleep(0.1)
            assert (activity.measure_idle_s() >= 2) == is_idle
        finally:
            process.kill()
