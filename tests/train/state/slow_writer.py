"""A writer whose disk is slow or fails, as a file tells it: the program of a rank's writer in tests."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from paceline.checkpoint import files
from paceline.checkpoint.writing import writer

# The environment variable with the path of a file: JSON with `delay_s` before every operation (at most, drawn
# at random, if `random` is set), and `errno` of every write. Without the file, nothing is unusual.
ORDERS = "PACELINE_TEST_WRITER"


def main() -> None:
    """Run the writer over such a disk."""
    orders = Path(os.environ[ORDERS])

    def hook(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if not orders.exists():
            return
        asked = json.loads(orders.read_text())
        delay_s = asked.get("delay_s", 0.0)
        time.sleep(random.uniform(0, delay_s) if asked.get("random") else delay_s)
        if operation == "write" and asked.get("errno"):
            raise OSError(asked["errno"], os.strerror(asked["errno"]), str(path))

    with files.inject(hook):
        writer.main()
