"""A rank's writer with a fault under its file operations."""

from __future__ import annotations

import os
from functools import partial

from paceline.checkpoint import files
from paceline.checkpoint.writing import writer
from tests.chaos.faults import FAULT, LAUNCHER, Hook, load_fault, strike


def main() -> None:
    """Run the writer, with the fault of the environment."""
    kills = partial(strike, int(os.environ[LAUNCHER]), "writer")
    with files.inject(Hook(load_fault(os.environ[FAULT]), kills, in_writer=True)):
        writer.main()
