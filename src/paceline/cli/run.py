"""`paceline run SCRIPT`: launches any script, like torchrun."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.grace import add_grace_flag, announce_grace
from paceline.cli.job_status import print_status
from paceline.cli.lint import lint_beside
from paceline.cli.profiling import (
    add_profile_flags,
    forget_recording,
    print_recording,
    refuse_recording,
    request_recording,
)
from paceline.cli.watching import add_watching_flags, as_table, build_watcher, print_error, with_places
from paceline.errors import PacelineError

_LEAST_S = 0.5
# Errors of nodes that did not meet, and words of a rank's end or of a verdict that say that ranks did not.
_NOT_MET = ("PL344", "PL375", "PL381")
_MEETING = ("init_process_group", "connectFullMesh", "rendezvous")
_DESCRIPTION = """
Runs a script on many ranks, as torchrun does and with torchrun's flags. torch is imported once and the ranks
are forked from that, so they start in a fraction of the time; where one fails, the last message names the one
that failed first, with its traceback. Where they hang or mix up their collectives, it says who waits where
for whom, and the job is ended.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "run", help="run any script on many ranks: torchrun's flags, started warm", description=_DESCRIPTION
    )
    ours = add_run_flags(parser)
    add_profile_flags(ours)
    parser.set_defaults(run=run)


def add_run_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add torchrun's flags, the script, and Paceline's own flags; return the group of the latter."""
    from paceline.launching.flags import add_torchrun_flags

    ours = parser.add_argument_group("paceline's own flags")
    ours.add_argument(
        "--cold", action="store_true", help="start a separate Python process for every rank, as torchrun does"
    )
    ours.add_argument(
        "--threads-per-rank",
        type=int,
        metavar="N",
        help="OMP_NUM_THREADS of every rank (default: from the environment, else cores / ranks)",
    )
    ours.add_argument(
        "--detect-s",
        type=float,
        metavar="S",
        help="seconds without a beat after which a node is lost (default 3); other waits are derived from it",
    )
    ours.add_argument(
        "--join-timeout",
        type=float,
        metavar="S",
        help="seconds to wait for nodes that are missing (default 600)",
    )
    add_grace_flag(ours)
    status: Any = ours.add_argument(
        "--status",
        action=_NeedsNoScript,
        help="print the members, the round and the state of the job at --rdzv-endpoint, and exit",
    )
    add_watching_flags(ours)
    ours.add_argument("--no-lint", action="store_true", help="do not read the script for mistakes")
    ours.add_argument(
        "--json",
        action="store_true",
        help="write Paceline's own messages as one JSON object per line to standard error",
    )
    status.script_actions = add_torchrun_flags(parser)
    return ours


class _NeedsNoScript(argparse.Action):
    """A switch that takes the place of the script."""

    script_actions: tuple[argparse.Action, ...]

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True)
        for action in self.script_actions:
            action.required = False


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    if args.status:
        return print_status(
            *(args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id), detect_s=args.detect_s, as_json=args.json
        )
    import logging

    from paceline.launching.ending.endings import PumpLost, RankFailed
    from paceline.launching.stop import Interrupted
    from paceline.launching.watcher import JobStuck

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("paceline: %(message)s"))
    if args.json:
        handler.format = lambda record: json.dumps({"message": record.getMessage()})  # type: ignore[method-assign]
    logger = logging.getLogger("paceline.launching")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    code = 0
    try:
        _run(args)
    except Interrupted as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would break the exit
        logger.warning("%s", end)
        code = end.exit_code
    except (RankFailed, JobStuck, PumpLost) as end:
        said = f"{end} {end.trace if isinstance(end, RankFailed) else ''}"
        met = not any(word in said for word in _MEETING)
        _print_end(args, as_table(end), str(end), "" if met else _look_at_meeting(args))
        code = end.exit_code
    except PacelineError as error:
        met = error.code not in _NOT_MET
        _print_end(args, as_table(error), with_places(error), "" if met else _look_at_meeting(args))
        code = error.exit_code
        forget_recording(args)
    print_recording(args, has_failed=code != 0)
    # All files and processes are closed. Python's normal exit, with torch loaded, would delay the shell's
    # prompt, and the agent's thread may be waiting in torch for a lost node.
    sys.stdout.flush()
    os._exit(code)


def _run(args: argparse.Namespace) -> None:
    from paceline.launching.elastic.network import read_place
    from paceline.launching.run_script import run_script

    for name, least in (("threads_per_rank", 1), ("detect_s", _LEAST_S), ("join_timeout", _LEAST_S)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            flag = f"--{name.replace('_', '-')}"
            raise PacelineError(
                "PL345",
                saw=f"{flag} {value:g}.",
                rule=f"It is at least {least:g}. Nodes beat six times in --detect-s.",
                fix=f"Leave {flag} out for the default.",
            )
    announce_grace(args)
    place = read_place(args, os.environ)
    if place.launcher == "torchrun" or (place.launcher != "single" and args.nproc_per_node is None):
        refuse_recording(args)
    watcher = build_watcher(args, request_recording(args))
    if place.launcher == "single" and not (args.no_lint or args.module or args.no_python):
        one_node = str(args.nnodes or 1) in ("1", "1:1")
        # Kept until the job ends, so that the process is reaped.
        lint_beside(args.training_script, as_json=args.json, one_node=one_node, advice=args.advice)
    run_script(args, cold=args.cold, threads=args.threads_per_rank, watcher=watcher)


def _look_at_meeting(args: argparse.Namespace) -> str:
    """Return what `paceline doctor` sees in two seconds of the place where the nodes meet."""
    if str(args.nnodes or 1) in ("1", "1:1"):
        return ""
    from paceline.doctor.meeting_check import describe_meeting

    place = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    host, _, port = place.rpartition(":")
    if args.rdzv_backend in ("folder", "etcd") or not port.isdigit():
        host, port = ("" if "/" in place or args.rdzv_backend != "c10d" else place), "29400"
    return describe_meeting(host.strip("[]"), int(port), os.environ)


def _print_end(args: argparse.Namespace, table: Mapping[str, Any], text: str, doctor: str = "") -> None:
    """Report the end of a job on standard error, because standard output is the script's."""
    if args.json:
        more = {"doctor": doctor} if doctor else {}
        print(json.dumps({"error": {**table, **more}}), file=sys.stderr, flush=True)
    else:
        print_error("\n".join(filter(None, (text, doctor and f"doctor: {doctor}"))))
