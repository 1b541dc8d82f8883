"""`paceline profile read`: where the time of recorded steps went, and who waited for whom."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = """
Reads traces of torch.profiler, one file per rank, and reports per step: computation, communication, how much
of it is exposed, who waits for whom, and what the late rank did.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("profile", help="find out where the time of a step goes, and who waits")
    kinds = parser.add_subparsers(dest="profile_command", required=True, metavar="WHAT")
    read = kinds.add_parser("read", help="report on traces that exist", description=_DESCRIPTION)
    read.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="a trace of a rank (.json or .json.gz), or a folder of such files",
    )
    read.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    read.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read and report; return 1 if something costs time that can be saved.

    Raises:
        PacelineError: PL900 to PL904 for traces that cannot be read or compared.
    """
    return report_traces(args.traces, as_json=args.json)


def report_traces(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print the report on traces, and return the exit code."""
    from paceline.cli.profile_report import as_table, describe_profile
    from paceline.profiling.analysis import analyse
    from paceline.profiling.judge import judge_profile
    from paceline.profiling.read import read_traces

    profile = analyse(read_traces(paths))
    findings = judge_profile(profile)
    if as_json:
        print(json.dumps(as_table(profile, findings)))
    else:
        print(describe_profile(profile, findings))
    return 1 if findings else 0
