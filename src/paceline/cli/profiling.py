"""Defines the flags that record traces of a job's ranks, and reports on these when it has ended."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cli.watching import as_table
from paceline.errors import PacelineError

_AFTER, _STEPS = 5, 20
# The first step that can be recorded: one must end before, and one passes.
_LEAST_FROM = 3


def add_profile_flags(parser: argparse._ActionsContainer) -> None:
    """Add `--profile`."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help=f"record {_STEPS} optimizer steps of each rank into this new folder, and report where the time "
        "goes; `paceline profile` chooses other steps",
    )


def request_recording(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the launcher asks its ranks for, if the flags ask for a recording."""
    if args.profile is None:
        return None
    if args.no_watch:
        raise _flag_error(
            "a recording with --no-watch", "The threads that watch the ranks also start the recording."
        )
    from paceline.profiling.kineto import import_msgspec
    from paceline.profiling.launcher import build_request, prepare_folder
    from paceline.profiling.rank.recorder import RecordSettings

    import_msgspec()
    folder = prepare_folder(args.profile)
    after, steps = getattr(args, "first", None), getattr(args, "steps", None)
    return build_request(RecordSettings(str(folder), _AFTER if after is None else after - 2, steps or _STEPS))


def check_steps(first: int | None, steps: int | None) -> None:
    """Raise PL905 for steps that cannot be recorded."""
    if first is not None and first < _LEAST_FROM:
        raise _flag_error(
            f"--from {first}",
            f"The steps before it start the recording on all ranks, so it is at least {_LEAST_FROM}.",
        )
    if steps is not None and steps < 1:
        raise _flag_error(f"--steps {steps}", "It is a number of optimizer steps, at least 1.")


def _flag_error(saw: str, rule: str) -> PacelineError:
    return PacelineError("PL905", saw=f"{saw}.", rule=rule, fix="Leave it out.")


def refuse_recording(args: argparse.Namespace) -> None:
    """Raise PL905 if recording is asked for in ranks that another launcher has started."""
    if args.profile is not None:
        raise PacelineError(
            "PL905",
            saw=f"--profile {args.profile} under torchrun, srun or mpirun.",
            rule="Paceline's launcher passes the recording to the ranks that it starts.",
            fix="Start the job with `paceline run --nproc-per-node N` or `paceline train --nproc N`.",
        )


def forget_recording(args: argparse.Namespace) -> None:
    """Remove the folder of a job that has failed, if it is empty: what ended the job is reported."""
    if args.profile is not None:
        with suppress(OSError):
            args.profile.rmdir()


def print_recording(args: argparse.Namespace, *, has_failed: bool) -> None:
    """Print the report on a job on standard error, since its own output is on standard output.

    Args:
        has_failed: whether a message has said already why the job has ended.
    """
    if has_failed:
        forget_recording(args)
    if args.profile is not None and args.profile.is_dir():
        text, table = describe_recording(args)
        print(json.dumps({"profile": table}) if args.json else text, file=sys.stderr, flush=True)


def describe_recording(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the report for people and for programs; why there is none counts as one."""
    try:
        return report_recording(args)[:2]
    except PacelineError as error:
        return f"paceline: {error}", {"error": as_table(error)}


def report_recording(args: argparse.Namespace) -> tuple[str, dict[str, Any], bool]:
    """Return the report on the last recording, for people and for programs, and whether it has findings."""
    from paceline.profiling.launcher import FAILURES, PATTERN
    from paceline.profiling.rank.recorder import failure_error

    has_traces = any(args.profile.glob(PATTERN))
    for path in sorted(args.profile.glob(FAILURES)) if not has_traces else ():
        raise failure_error(path.stem.replace("-", " "), path.read_text(encoding="utf-8"))
    if not has_traces:
        raise PacelineError(
            "PL907",
            saw=f"no rank has recorded a step in {args.profile}.",
            rule="Recording starts at the step of `paceline profile --from`, by default the 7th.",
            fix="Let the script run longer, or lower --from.",
        )
    text, table, has_findings = report_on([args.profile])
    return f"{text}\n\nrecorded: {args.profile}", table, has_findings


def report_on(paths: Sequence[Path]) -> tuple[str, dict[str, Any], bool]:
    """Return the report on traces for people and for programs, and whether there are findings.

    Args:
        paths: files or folders of traces.
    """
    from paceline.cli.profile_report import as_table as tabulate
    from paceline.cli.profile_report import describe_profile
    from paceline.profiling.analysis import analyse
    from paceline.profiling.judge import judge_profile
    from paceline.profiling.read import read_traces

    traces = read_traces(paths)
    profile = analyse(traces)
    findings = judge_profile(profile)
    return describe_profile(profile, findings), tabulate(profile, findings), bool(findings)
