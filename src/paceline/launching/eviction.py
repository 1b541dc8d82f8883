"""Checks `--evict-slow`, and connects the watcher, which finds slow ranks, with the launchers' agreement."""

from __future__ import annotations

import argparse

from paceline.errors import PacelineError
from paceline.exit_codes import STOPPED
from paceline.launching.elastic.network import WITNESSES
from paceline.launching.processes.ranks import Attempts
from paceline.launching.watcher import Watcher

# The shortest window in which the watch compares ranks.
_LEAST_S = 10.0


def check_eviction(flags: argparse.Namespace, watcher: Watcher | None) -> None:
    """Raise PL385 if slow nodes are to be put out of a job that has none to spare or does not find them."""
    seconds = flags.evict_slow
    if seconds is None:
        return
    least, _, most = str(flags.nnodes).partition(":")
    saw = f"--evict-slow {seconds:g}"
    if not seconds >= _LEAST_S:
        fix = f"Use at least {_LEAST_S:g} seconds, better 60."
    elif not most or least == most or flags.standalone:
        saw += f" with --nnodes {flags.nnodes}"
        fix = "Use a range such as --nnodes 2:4, or leave --evict-slow out."
    elif flags.rdzv_backend not in ("c10d", *WITNESSES) or "store_type" in flags.rdzv_conf:
        saw += f" with --rdzv-backend {flags.rdzv_backend}"
        saw += f" --rdzv-conf {flags.rdzv_conf}" if flags.rdzv_conf else ""
        fix = "Add --rdzv-backend c10d, without store_type, or leave --evict-slow out."
    elif watcher is None or not watcher.can_find_slow_nodes:
        saw += " with --no-watch"
        fix = "Leave one of them out."
    else:
        return
    raise PacelineError(
        "PL385",
        saw=f"{saw}.",
        rule="A node is put out if others have waited for its ranks for that many seconds (at least 10: the "
        "watch compares ranks over such times), and if at least MIN nodes of --nnodes are left.",
        fix=fix,
    )


def watch_for_eviction(seconds: float | None, watcher: Watcher | None, rounds: Attempts) -> None:
    """Make the watcher report this node to its job once it has been slow for that long."""
    if seconds is not None and watcher is not None:
        watcher.find_slow_node(seconds, lambda ranks, evidence: rounds.report_slow(ranks, evidence))


def put_out_error(evidence: str) -> PacelineError:
    """Return the error of a node that was put out of its job."""
    error = PacelineError(
        "PL822",
        saw=f"This node was put out of the job, because it is slow: {evidence}.",
        rule="With --evict-slow, a node that makes others wait for so long leaves, and the others go on.",
        fix="Check this machine: other processes on its cores or devices, limits, clocks and temperatures. "
        "Start the same command on another one, or on this one when it is in order.",
    )
    error.exit_code = STOPPED
    return error
