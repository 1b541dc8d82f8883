"""One writer of a joint save, as a process that may be killed before any of its operations.

`python -m tests.checkpoint.joint_writer ORDER DATA KILL_AT` writes what `order.files` takes from the file
DATA, without torch. It prints the outcome and the operations that it made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint import files
from paceline.checkpoint.writing.joint import JointSave, Order
from paceline.errors import PacelineError


def main() -> None:
    """Make one writer's part of the save."""
    order, data, kill_at = Order(**json.loads(sys.argv[1])), Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
    operations: list[str] = []

    def hook(operation: str, path: Path, start: int, num_bytes: int) -> int | None:
        operations.append(f"{operation} {path.name}")
        if len(operations) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return max(1, num_bytes // 2) if operation == "write" and start == 0 else None

    def read(start: int, num_bytes: int) -> Iterator[memoryview]:
        yield memoryview(data)[start : start + num_bytes]

    with files.inject(hook):
        save = JointSave(order)
        try:
            save.begin()
            save.write(read)
            outcome = save.conclude()
        except PacelineError as error:
            outcome = save.fail(error)
        save.leave(outcome)
    print(json.dumps({"outcome": outcome.dump(), "operations": operations}))


if __name__ == "__main__":
    main()
