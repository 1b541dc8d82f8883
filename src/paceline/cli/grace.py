"""Defines `--grace-s`, the time between a signal of the scheduler and the end of the ranks."""

from __future__ import annotations

import argparse
import os

from paceline.errors import PacelineError


def add_grace_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--grace-s`."""
    parser.add_argument(
        "--grace-s",
        type=float,
        metavar="S",
        help="seconds between a stop signal and the end of this machine or job, as the scheduler gives them; "
        "ranks may take as long to save and leave, and a save that takes longer is reported",
    )


def announce_grace(args: argparse.Namespace) -> None:
    """Put `--grace-s` into the environment, where launchers and ranks read it."""
    if args.grace_s is None:
        return
    if not args.grace_s >= 1:
        raise PacelineError(
            "PL366",
            saw=f"--grace-s {args.grace_s:g}.",
            rule="It is the number of seconds that ranks have to save and leave, at least 1.",
            fix="Use the time that the scheduler gives, or leave it out.",
        )
    from paceline.place import note_grace

    note_grace(os.environ, args.grace_s)
