"""Defines the flags of commands whose ranks are watched, and prints what the watcher reports."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.codes import read_pages
from paceline.errors import PacelineError
from paceline.launching.ending.endings import PumpLost, RankFailed
from paceline.launching.watcher import HANG_AFTER_S, JobStuck

if TYPE_CHECKING:
    from paceline.launching.watcher import Watcher, WatchMessage


def add_watching_flags(parser: argparse._ActionsContainer) -> None:
    """Add `--hang-after`, `--keep-alive`, `--advice` and `--no-watch`."""
    parser.add_argument(
        "--hang-after",
        type=float,
        default=HANG_AFTER_S,
        metavar="S",
        help="seconds without any sign of work on any rank after which waiting ranks count as hanging "
        "(default %(default)g; ten times as long if a rank computes)",
    )
    parser.add_argument("--keep-alive", action="store_true", help="report a hang and leave the ranks running")
    parser.add_argument(
        "--advice", action="store_true", help="report what may be improved as well as mistakes"
    )
    parser.add_argument(
        "--no-watch", action="store_true", help="do not record collectives and do not watch for hangs"
    )
    # For `paceline bench`, which starts this command.
    parser.add_argument("--bench", type=Path, help=argparse.SUPPRESS)


def build_watcher(args: argparse.Namespace, request: dict[str, Any] | None) -> Watcher | None:
    """Return the watcher that the flags ask for, if any.

    Args:
        request: what each rank is asked for before its script's first line.
    """
    if not args.hang_after > 0:
        raise PacelineError(
            "PL349",
            saw=f"--hang-after {args.hang_after:g}.",
            rule="It is the number of seconds for which ranks may make no progress.",
            fix=f"Leave it out for {HANG_AFTER_S:g}, or turn the watch off with --no-watch.",
        )
    if args.no_watch:
        return None
    from paceline.watch.launcher.watcher import RankWatcher

    if args.bench is not None:
        request = json.loads(args.bench.read_text(encoding="utf-8"))
    report = partial(_print_message, as_json=args.json)
    return RankWatcher(
        args.hang_after,
        keep_alive=args.keep_alive,
        report=report,
        has_advice=args.advice,
        request=request,
    )


def print_error(text: str) -> None:
    """Report something that ends a job, or would."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def with_places(error: PacelineError) -> str:
    """Return the text of a user's mistake, with the lines of the user's code that led to it."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", ())])


def print_remark(text: str) -> None:
    """Print what a user should know of a run that starts nevertheless."""
    print(text, file=sys.stderr, flush=True)


def _print_message(message: WatchMessage, *, as_json: bool) -> None:
    """Report something about a job that continues."""
    if as_json:
        print(json.dumps({"finding": message.table}), file=sys.stderr, flush=True)
    else:
        print_error(message.text)


def as_table(end: PacelineError | RankFailed | JobStuck | PumpLost) -> dict[str, Any]:
    """Return what ended a job, as JSON: a finding, and its details."""
    if isinstance(end, PacelineError):
        return {"code": end.code, "saw": end.saw, "rule": end.rule, "fix": end.fix}
    if isinstance(end, JobStuck):
        return {**end.message.table, "hint": end.hint}
    page = read_pages()[end.code]
    table: dict[str, Any] = {"code": end.code, "where": "", "saw": "", "rule": page.why, "fix": page.fix}
    if isinstance(end, PumpLost):
        return {**table, "where": "the launcher", "saw": str(end)}
    more = {"rank": end.rank, "status": end.status, "traceback": end.trace, "hint": end.hint}
    return {**table, "where": f"rank {end.rank}", "saw": end.headline, **more}
