"""Builds the last message of a job: which rank failed first, its error, and the place of the logs."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

from paceline.errors import PacelineError, has_lost_peer
from paceline.exit_codes import STOPPED
from paceline.launching.ending.endings import (
    ASKED_TO_STOP,
    Ending,
    PumpLost,
    RankFailed,
    find_cause,
    may_follow,
    read_endings,
)
from paceline.launching.ending.oom_kills import describe_kill, explain_kill
from paceline.launching.ending.tracebacks import find_last
from paceline.launching.job import Job, ScriptJob
from paceline.launching.processes.ranks import COLD, RankProcess, Ranks
from paceline.launching.stop import Interrupted, Stop
from paceline.launching.watcher import JobStuck, WatchMessage, name_account
from paceline.memory.account_report import read_account
from paceline.memory.account_words import describe
from paceline.units import format_seconds

log = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 65536
# A run that has saved finds no checkpoint.
_MISSING_FILES = "PL550"
# torch's words for a worker of a loader that was killed in place of its rank.
_WORKER_KILLED = "killed by signal: Killed"
_LOST_HERE = "It lost the connection to a peer, and no rank is known to have failed on its own."
_LOST_ELSEWHERE = (
    "It lost the connection to a peer: the cause is a rank that ended on another node; see the output there."
)


def judge(job: Job, ranks: Ranks, error: BaseException | None, stop: Stop) -> None:
    """Raise the error that ended a failed job.

    Args:
        job: the script or the function that ran.
        ranks: its ranks; the newest process of each is judged.
        error: the agent's error, if it failed.
        stop: what ended the ranks before the agent did, if anything.

    Raises:
        PumpLost: if the pump has died, so that the ranks' output is lost.
        JobStuck: if the watcher has found that the ranks cannot continue.
        RankFailed: if a rank failed; for the first one that did not only lose its peer.
        Interrupted: if a script was asked to stop, or its ranks exited with the code for that.
        SystemExit: if a function was asked to stop, or its ranks stopped as if they had been.
        OSError: if the limit of open files is too low.
    """
    if stop.lost:
        raise PumpLost
    if job.pump is not None:
        job.pump.drain()
    if job.watcher is not None and job.watcher.final_message:
        job.keeps_logs = True
        raise JobStuck(job.watcher.final_message)
    endings = _collect_endings(job, ranks)
    cause = find_cause(endings)
    if job.rounds.asked is not None:
        if cause is not None and not cause.follower and cause.kind == "error":
            raise _fail(job, ranks, cause)
        # torch's agent kills ranks after the same time, and may come first.
        num_killed = sum(ending.code == -signal.SIGKILL for ending in endings)
        raise job.stop_error(job.rounds.asked, stop.num_killed or num_killed)
    _warn_late_settings(job)
    if cause is None:
        # This launcher was not asked to stop: its ranks stopped with those of another node, or a rank raised
        # KeyboardInterrupt, or exited with such a code.
        cause = next((ending for ending in endings if ending.code in ASKED_TO_STOP), None)
        if cause is not None and not job.is_program:
            raise SystemExit(cause.code)
        if cause is not None and cause.code == STOPPED:
            raise Interrupted(None, 0)
    if error is None:
        return
    if isinstance(error, PacelineError):  # the nodes that the job needs are not there
        raise error
    if cause is not None:
        raise _fail(job, ranks, cause) from None
    raised = job.start_error(error)
    raise raised from (None if raised is error else error)


def may_be_consequence(job: Job, ranks: Ranks) -> bool:
    """Return whether all failures of this node's ranks may have their cause on another node."""
    return all(ending.follower or ending.code == STOPPED for ending in _collect_endings(job, ranks))


def find_missing_files(job: Job, ranks: Ranks) -> PacelineError | None:
    """Return the error of ranks that failed because the files of other nodes are missing, if any did."""
    cause = find_cause(_collect_endings(job, ranks))
    error = None if cause is None else cause.error()
    return error if error is not None and error.code == _MISSING_FILES else None


def log_restart(job: ScriptJob, ranks: Ranks, remaining: int, news: str | None = None) -> None:
    """Log why all ranks of this node start again.

    Args:
        remaining: the restarts that are left.
        news: why the nodes have changed, if that is the reason.
    """
    if news is not None:
        log.warning("the nodes have changed: %s; all ranks start again", news)
        return
    cause = find_cause(_collect_endings(job, ranks))
    if cause is None:
        log.warning("the nodes have changed; all ranks start again")
        return
    why, is_cause = _explain(job, ranks, cause)
    what = cause.error() or RankFailed(cause.rank, cause.code, cause.trace)
    log.warning("%s", (why.text if why is not None and is_cause else str(what)).splitlines()[0])
    log.warning("all ranks start again; %d restart%s left", remaining, "" if remaining == 1 else "s")


def refuse_lost_output(job: ScriptJob) -> None:
    """Raise PL603 after a successful script if some of the ranks' output could not be written.

    The ranks continued, because hours of training are worth more than lines of output. But a reader of the
    exit code alone must not assume that the output is complete.
    """
    if job.pump.lost is None:
        return
    error, to = job.pump.lost
    job.keeps_logs = True
    raise PacelineError(
        "PL603",
        saw=f"standard {'output' if to == 1 else 'error'} cannot be written: {error.strerror}. All ranks "
        "succeeded, but some of their output is missing there.",
        rule="The ranks' output goes there, and to their logs.",
        fix=f"Read the logs in {job.logs}; send the output to a file on a disk with space.",
    )


def _collect_endings(job: Job, ranks: Ranks) -> list[Ending]:
    """Return how each failed rank of the last round ended: by its own record, else by its status and log."""
    endings = {ending.rank: ending for ending in read_endings(job.attempt)}
    for process in ranks.latest:
        rank, status = process.start.rank, process.returncode
        if rank in endings or status in (0, None) or process.asked or process.refusal:
            continue
        trace = find_last(_read_tail(process.start.log))
        ended_s = process.ended_s or time.time()
        endings[rank] = Ending(rank, "error", status or 1, ended_s, has_lost_peer(trace), trace=trace)
    return sorted(endings.values(), key=lambda ending: ending.time_s)


def _fail(job: Job, ranks: Ranks, cause: Ending) -> RankFailed | JobStuck | PacelineError:
    process = next((p for p in ranks.latest if p.start.rank == cause.rank), None)
    logs = ""
    if process is not None and job.logs is not None:
        logs = f"The ranks' output: {job.logs}/rank-*.log; of this one: {process.start.log}"
    why, is_cause = _explain(job, ranks, cause)
    if why is not None and is_cause:
        job.keeps_logs = True
        return JobStuck(why, logs)
    hints = [] if why is None else [f"The ranks' collectives do not match either: {why.text}"]
    if process is not None:
        hints.append(_explain_end(job, ranks, cause.code))
        hints.append(_describe_memory(job, process, cause))
    if cause.follower and process is not None:
        is_one_node = process.start.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        hints.append(_LOST_HERE if is_one_node else _LOST_ELSEWHERE)
    if job.watcher is not None and why is None:
        hints.append(job.watcher.other_places)
    hints.append(logs)
    job.keeps_logs = True
    ours = cause.error()
    if ours is not None:
        if job.is_program:
            ours.exit_code = 1  # as torchrun's if a rank fails
        return ours
    return RankFailed(cause.rank, cause.code, cause.trace, hint="\n".join(hint for hint in hints if hint))


def _explain(job: Job, ranks: Ranks, cause: Ending) -> tuple[WatchMessage | None, bool]:
    """Return the watcher's explanation of why ranks failed, if any, and whether this rank failed of that."""
    if job.watcher is None:
        return None, False
    logs = [_read_tail(process.start.log) for process in ranks.latest]
    return job.watcher.explain_failure(), may_follow(cause, logs)


def _explain_end(job: Job, ranks: Ranks, status: int) -> str:
    """Return what ended a rank besides its own code, if known, else an empty string."""
    if ranks.keeper_died:
        return "The process that ranks are forked from was killed, and the ranks with it."
    if status == -signal.SIGKILL:
        return describe_kill(job.ooms)
    return ""


def _describe_memory(job: Job, process: RankProcess, cause: Ending) -> str:
    """Return what filled a rank's memory if it ended for that and left an account, else an empty string."""
    account = read_account(name_account(job.attempt, process.start.rank))
    if account is None:
        return ""
    if account.is_raised:
        return describe(account) if cause.code >= 0 else ""
    is_counted = job.ooms.in_group is not None or job.ooms.on_machine is not None
    is_killed = cause.code == -signal.SIGKILL or _WORKER_KILLED in cause.trace
    if not is_killed or (is_counted and not explain_kill(job.ooms)):
        return ""
    before_s = (process.ended_s or time.time()) - account.time_s
    return f"{format_seconds(max(0.0, before_s))} before its end: {describe(account)}"


def _read_tail(path: str) -> str:
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")
    return ""


def _warn_late_settings(job: Job) -> None:
    names = {
        word for path in job.attempt.glob(f"{COLD}*") for word in path.read_text(encoding="utf-8").split()
    }
    if names:
        log.warning(
            "the script set %s before it imported torch, which the warm start had imported already, so its "
            "ranks restarted cold; --cold avoids the first attempt",
            ", ".join(sorted(names)),
        )
