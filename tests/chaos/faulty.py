"""`paceline` with a fault in saving: `python -m tests.chaos.faulty FAULT train RECIPE ...`.

The command line, the launcher and the ranks are the real ones; only the function that each rank calls
has the fault around it.
"""

from __future__ import annotations

import functools
import sys


def main() -> int:
    """Run `paceline` with what follows the fault."""
    from paceline.cli import train
    from paceline.cli.main import main as paceline
    from tests.chaos.faults import train_with_fault

    train.train_on_rank = functools.partial(train_with_fault, sys.argv[1])  # type: ignore[assignment]
    return paceline(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
