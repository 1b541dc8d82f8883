"""`paceline profile`: where the time of steps goes, and who waits for whom."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.cli.command_words import take_default
from paceline.errors import PacelineError

_DESCRIPTION = """
Runs any script, unmodified, as `paceline run` does, records some of its optimizer steps, and reports where
their time goes: computation, communication, how much of it is exposed, who waits for whom, and at which line
the late rank is. `paceline profile read` reports on traces that exist.
"""
_READ = """
Reads traces of torch.profiler, one file per rank, and reports per step: computation, communication, how much
of it is exposed, who waits for whom, and what the late rank did.
"""
_SCRIPT = "script"
_TRACES = "a trace of a rank (.json or .json.gz), or a folder of such files"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="find out where the time of a step goes, and who waits",
        description=_DESCRIPTION,
        usage="%(prog)s [flags] SCRIPT [ARGS] | read TRACE...",
        epilog=f"`paceline profile {_SCRIPT} --help` lists the flags that come before a script.",
    )
    # argparse would put the usage before the names of the commands.
    kinds = parser.add_subparsers(dest="profile_command", metavar="read", title="commands", prog=parser.prog)
    parser.set_defaults(run=_say_what_to_type)
    read = kinds.add_parser("read", help="report on traces that exist", description=_READ)
    read.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help=_TRACES)
    read.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    read.set_defaults(run=run)
    _add_script(kinds)
    known = (*kinds.choices, "-h", "--help")
    take_default(parser, _SCRIPT, lambda word: word not in known)


def _say_what_to_type(args: argparse.Namespace) -> int:
    raise PacelineError(
        "PL600",
        saw="nothing to profile was named.",
        rule="It records a script that it starts, or reads traces that exist.",
        fix="Type `paceline profile SCRIPT` or `paceline profile read TRACE`.",
    )


def _add_script(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from paceline.cli.run import add_run_flags

    script = kinds.add_parser(_SCRIPT, description=_DESCRIPTION)
    script.prog = script.prog.removesuffix(f" {_SCRIPT}")
    _add_recording_flags(add_run_flags(script))
    script.set_defaults(run=run_script)


def _add_recording_flags(ours: argparse._ActionsContainer) -> None:
    ours.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new folder for the recording (default: profile-1, profile-2 ...)",
    )
    ours.add_argument(
        "--from",
        type=int,
        dest="first",
        metavar="STEP",
        help="the first optimizer step to record (default 7)",
    )
    ours.add_argument("--steps", type=int, metavar="N", help="optimizer steps to record (default 20)")


def run(args: argparse.Namespace) -> int:
    """Read and report; return 1 if something costs time that can be saved."""
    from paceline.cli.profiling import report_on

    text, table, has_findings = report_on(args.traces)
    print(json.dumps(table) if args.json else text)
    return 1 if has_findings else 0


def run_script(args: argparse.Namespace) -> int:
    """Run a script while recording it, and report; return the script's exit code."""
    from paceline.cli.profiling import check_steps
    from paceline.cli.run import run as run_ranks

    check_steps(args.first, args.steps)
    if args.out is None and args.nnodes not in (None, "1", "1:1"):
        raise PacelineError(
            "PL905",
            saw=f"--nnodes {args.nnodes} without --out.",
            rule="All nodes must write into folders of the same name.",
            fix="Add --out DIR.",
        )
    args.profile = args.out or _find_folder()
    return run_ranks(args)


def _find_folder() -> Path:
    number = 1
    while Path(f"profile-{number}").exists():
        number += 1
    return Path(f"profile-{number}")
