"""`paceline profile read`: where the time of recorded steps went, and who waited for whom."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.errors import PacelineError

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
    read.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also draw the timelines of all ranks, with the report, as one page without other files",
    )
    read.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    read.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read and report; return 1 if something costs time that can be saved.

    Raises:
        PacelineError: PL900 to PL904 for traces that cannot be read or compared, PL908 if the page cannot be
            written.
    """
    from paceline.cli.profile_report import as_table, describe_profile
    from paceline.profiling.analysis import analyse
    from paceline.profiling.judge import judge_profile
    from paceline.profiling.read import read_traces

    traces = read_traces(args.traces)
    profile = analyse(traces)
    findings = judge_profile(profile)
    text = describe_profile(profile, findings)
    if args.html is not None:
        from paceline.profiling.page import draw_page

        _write(args.html, draw_page(traces, profile, text))
    print(json.dumps(as_table(profile, findings)) if args.json else text)
    return 1 if findings else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL908",
            saw=f"--html {path}: {error.strerror}.",
            rule="The page is written there, as one file.",
            fix="Name a file in a folder with write permission.",
        ) from None
