"""A process that saves checkpoints in children, and has them killed.

Started once per test session (importing torch takes longer than all kills): it reads one JSON object
per line and forks a child for each.

    {"run": folder, "keep": 2, "steps": [1, 2], "kill_at": 17}        SIGKILL before its 17th operation
    {"run": folder, "keep": 2, "steps": [1, 2], "delay_s": 0.01}      SIGKILL after so long

The answer is `{"killed": bool}`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Saver:
    """The test's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.saver"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, run: Path, steps: list[int], *, keep: int = 2, **kill: Any) -> bool:
        """Save `steps` one after the other in a child; return whether it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"run": str(run), "keep": keep, "steps": steps, **kill}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["status"] in (0, -signal.SIGKILL), answer
        return bool(answer["status"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Fault:
    """A fault hook that counts operations and calls `strike` before number `at`.

    The first write of a file goes in two halves, so that there is an instant at which half of it is there.
    """

    def __init__(self, at: int = -1, strike: Callable[[], None] = lambda: None) -> None:
        self.at = at
        self.strike = strike
        self.operations: list[str] = []

    def __call__(self, operation: str, path: Path, start: int, num_bytes: int) -> int | None:
        self.operations.append(operation)
        if len(self.operations) == self.at:
            self.strike()
        return max(1, num_bytes // 2) if operation == "write" and start == 0 else None


def _save(order: dict[str, Any]) -> None:
    from paceline.checkpoint import CheckpointFolder, files
    from tests.checkpoint.states import save

    folder = CheckpointFolder(order["run"], keep=order["keep"])
    with files.inject(Fault(order.get("kill_at", -1), lambda: os.kill(os.getpid(), signal.SIGKILL))):
        for step in order["steps"]:
            save(folder, step)


def main() -> None:
    """Serve orders until its input ends."""
    import torch  # before forking, so that children are ready at once

    import tests.checkpoint.states  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _save(order)
                status = 0
            finally:
                os._exit(status)
        if "delay_s" in order:
            time.sleep(order["delay_s"])
            os.kill(child, signal.SIGKILL)
        _, code = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(code)}), flush=True)


if __name__ == "__main__":
    main()
