"""Explains failures of ranks whose cause is elsewhere: mismatched collectives, or a peer that ended.

Gloo aborts a rank that receives more bytes than it expects, and lets one receive fewer. Either way the others
lose their connection to it within milliseconds; with NCCL they fail after a timeout. Each rank's last report
shows where it was just before, and from these the verdict follows as for ranks that hang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.watch.protocol.report import Call, Report, Seen, SharedPlace, Stack, Verdict
from paceline.watch.protocol.words import own_frames, sequence_of
from paceline.watch.reasoning.activity import is_in_torch, waits_for_device
from paceline.watch.reasoning.hang import explain_hang
from paceline.watch.reasoning.mismatch import find_mismatch, merge_groups
from paceline.watch.reasoning.source import Source
from paceline.watch.reasoning.states import State, find_states
from paceline.watch.reasoning.verdict import list_places

_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)

Reader = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Failure:
    """The explanation of a failure, as far as it is known.

    Attributes:
        verdict: the cause; `None` if only the failure itself is known.
        failed: the places of ranks that failed by themselves and left no traceback here.
        others: the current or last places of the ranks that have not failed.
    """

    verdict: Verdict | None
    failed: tuple[SharedPlace, ...] = ()
    others: tuple[SharedPlace, ...] = ()


def explain_failure(seen: Seen, here: Collection[int], read_source: Reader | None = None) -> Failure:
    """Return what is known of a job in which at least one rank has failed.

    Args:
        seen: the job, with the last reports of the ranks that could send one.
        read_source: as in `hang.explain_hang`.
    """
    source = Source(read_source)
    scene = rewind(seen, source)
    states = find_states(scene, source)
    calls = {rank: report.calls for rank, report in scene.reports.items()}
    verdict = find_mismatch(calls, merge_groups(scene.reports), read_source)
    if verdict is not None:
        shown = {rank for place in verdict.places for rank in place.ranks}
        rest = list_places(s for rank, s in states.items() if rank not in shown and _has_information(s))
        verdict = replace(verdict, places=(*verdict.places, *rest))
    elif not any(_has_failed(rank, scene) for rank in states):
        # With an error of its own on some rank, that error is the cause, and the launcher shows it.
        verdict = _explain_wait(states, scene, read_source)
    others = [s for s in states.values() if not _has_failed(s.rank, scene) and _has_information(s)]
    failed = [s for s in states.values() if _has_failed(s.rank, scene) and _left_no_trace(s, scene, here)]
    return Failure(verdict, tuple(list_places(failed)), tuple(list_places(others)))


def rewind(seen: Seen, source: Source) -> Seen:
    """Return the job as it was before ranks lost their peers: these are in their calls again."""
    processes, reports = dict(seen.processes), dict(seen.reports)
    for rank, report in seen.reports.items():
        process = processes.get(rank)
        if _is_echo(report):
            calls = _reopen(report, source)
            within = next((call.frames for call in calls if not call.done), report.stacks[0].frames)
            stacks = (Stack(report.stacks[0].thread, within),)
            reports[rank] = replace(report, phase="running", calls=calls, stacks=stacks)
            if process is not None:
                processes[rank] = replace(process, state="sleeping", exit_code=None, cpu_share=0.0)
        elif report.last is not None and process is not None:
            code = report.last.code if process.exit_code is None else process.exit_code
            processes[rank] = replace(process, state="ended", exit_code=code)
    return replace(seen, processes=processes, reports=reports)


def _is_echo(report: Report) -> bool:
    return report.last is not None and report.last.follower and bool(report.stacks)


def _reopen(report: Report, source: Source) -> tuple[Call, ...]:
    """Return the calls of a rank that has lost its peer, with the call that raised marked as not done.

    The recorder counts it as done by then. It is the call at the exception's line. An asynchronous call, or
    one from a hook, has another line: then it is the latest call, if torch raised the exception at all.
    """
    if any(not call.done for call in report.calls):
        return report.calls
    raised = report.stacks[0].frames
    line = own_frames(raised)[:1]
    same = [call for call in report.calls if line and own_frames(call.frames)[:1] == line]
    if not same and (is_in_torch(raised) or waits_for_device(raised, source)):
        same = list(report.calls)
    if not same:
        return report.calls
    last = max(same, key=lambda call: (call.began_s, call.number))
    return tuple(replace(call, done=False) if call is last else call for call in report.calls)


def _has_failed(rank: int, scene: Seen) -> bool:
    """Return whether a rank failed on its own; one that ended for an unknown reason counts as such."""
    report, process = scene.reports.get(rank), scene.processes.get(rank)
    if report is not None and report.last is not None:
        return not report.last.follower and report.last.code != 0
    return process is not None and process.state == "ended" and process.exit_code != 0


def _left_no_trace(state: State, scene: Seen, here: Collection[int]) -> bool:
    """Return whether a failed rank's place is known here only from its last report."""
    report = scene.reports.get(state.rank)
    if state.rank not in here:
        return True
    return (
        bool(state.frames) and report is not None and report.last is not None and report.last.kind != "error"
    )


def _has_information(state: State) -> bool:
    """Return whether a rank's place helps the reader.

    It does not for a rank that is failing just now, or for one on a node that has reported nothing.
    """
    return state.waits or bool(state.frames) or state.kind not in ("silent", "elsewhere", "missing")


# ---- a peer that has ended, or did not come in time


def _explain_wait(states: Mapping[int, State], scene: Seen, read_source: Reader | None) -> Verdict | None:
    """Return the verdict on ranks that waited until a peer ended normally, or until their group's timeout."""
    echoes = {rank: report.last for rank, report in scene.reports.items() if _is_echo(report)}
    has_left = any(
        states[other].kind == "ended" and _lacks(other, call, scene)
        for rank in echoes
        if (call := states[rank].call) is not None
        for other in states[rank].waits_for
    )
    has_timed_out = any(last is not None and _TIMEOUT.search(last.words) for last in echoes.values())
    # Of a timeout, the cause may be on a node that has reported nothing.
    if not has_left and not (has_timed_out and len(scene.processes) >= scene.world_size):
        return None
    return explain_hang(scene, read_source)


def _lacks(rank: int, call: Call, scene: Seen) -> bool:
    """Return whether a rank is known not to have issued a call."""
    report = scene.reports.get(rank)
    if report is None:
        return False
    if sequence_of(call):  # Beats count all of these together, and its calls were checked already.
        return bool(report.calls)
    numbers = [other.number for other in report.calls if other.group == call.group]
    return max([*numbers, report.issued.get(call.group, 0)]) < call.number
