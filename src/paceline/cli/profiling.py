"""Defines the flags that record traces of a job's ranks, and reports on these when it has ended."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.watching import as_table
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.launching.watcher import Watcher

_AFTER, _STEPS = 5, 5


def add_profile_flags(parser: argparse._ActionsContainer) -> None:
    """Add `--profile`, `--profile-after` and `--profile-steps`."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="record some optimizer steps of each rank into this new folder, and report where the time goes",
    )
    parser.add_argument(
        "--profile-after",
        type=int,
        metavar="N",
        help=f"optimizer steps before recording starts (default {_AFTER}; one more is left out)",
    )
    parser.add_argument(
        "--profile-steps", type=int, metavar="N", help=f"optimizer steps to record (default {_STEPS})"
    )


def add_recording(args: argparse.Namespace, watcher: Watcher | None) -> Watcher | None:
    """Return a watcher that also records the ranks, if the flags ask for it.

    Raises:
        PacelineError: PL905 for flags that do not fit, PL906 if the folder cannot be used, PL901 without
            msgspec, which the report needs.
    """
    for name in ("profile_after", "profile_steps"):
        value = getattr(args, name)
        if value is not None and (args.profile is None or value < 1):
            raise PacelineError(
                "PL905",
                saw=f"--{name.replace('_', '-')} {value}{'' if args.profile else ' without --profile'}.",
                rule="It is a number of optimizer steps, at least 1, for a recording with --profile DIR.",
                fix="Use for example --profile traces --profile-after 10 --profile-steps 5.",
            )
    if args.profile is None:
        return watcher
    from paceline.profiling.kineto import import_msgspec
    from paceline.profiling.launcher import RecordingWatcher, prepare_folder
    from paceline.profiling.rank.recorder import RecordSettings

    import_msgspec()
    folder = prepare_folder(args.profile)
    settings = RecordSettings(str(folder), args.profile_after or _AFTER, args.profile_steps or _STEPS)
    return RecordingWatcher(settings, watcher)


def refuse_recording(args: argparse.Namespace) -> None:
    """Raise PL905 if recording is asked for in ranks that another launcher has started."""
    if args.profile is not None:
        raise PacelineError(
            "PL905",
            saw=f"--profile {args.profile} under torchrun, srun or mpirun.",
            rule="Paceline's launcher hands the recording to the ranks that it starts.",
            fix="Start the job with `paceline run --nproc-per-node N` or `paceline train --nproc N`.",
        )


def print_recording(args: argparse.Namespace) -> None:
    """Print the report on a job on standard error, since its own output is on standard output."""
    if args.profile is not None and args.profile.is_dir():
        text, table = describe_recording(args)
        print(json.dumps({"profile": table}) if args.json else text, file=sys.stderr, flush=True)


def describe_recording(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the report for people and for programs; why there is none counts as one."""
    try:
        return report_recording(args)
    except PacelineError as error:
        return f"paceline: {error}", {"error": as_table(error)}


def report_recording(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the report on what was recorded, for people and for programs.

    Raises:
        PacelineError: PL907 if there is no trace, and as `analyse`.
    """
    from paceline.cli.profile_report import as_table as tabulate
    from paceline.cli.profile_report import describe_profile
    from paceline.profiling.analysis import analyse
    from paceline.profiling.judge import judge_profile
    from paceline.profiling.launcher import PATTERN
    from paceline.profiling.read import read_traces

    paths = sorted(args.profile.glob(PATTERN))
    if not paths:
        raise PacelineError(
            "PL907",
            saw=f"no rank has recorded a step in {args.profile}.",
            rule=f"Recording starts after {args.profile_after or _AFTER} optimizer steps, and one passes.",
            fix="Lower --profile-after, or let the script run longer.",
        )
    profile = analyse(read_traces(paths))
    findings = judge_profile(profile)
    return describe_profile(profile, findings), tabulate(profile, findings)
