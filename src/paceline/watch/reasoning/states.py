"""Determines each rank's state, and for which others it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.watch.protocol.report import BUSY_SHARE, Call, Frame, Group, Process, Report, Seen
from paceline.watch.protocol.words import (
    describe_tensors,
    is_pairwise,
    name_call,
    name_exit,
    name_label,
    name_line,
    name_purpose,
    own_frames,
    sequence_of,
)
from paceline.watch.reasoning.activity import (
    find_activity,
    find_building,
    find_distributed,
    is_bucket,
    is_in_torch,
    is_joining,
    waits_for_device,
)
from paceline.watch.reasoning.source import Source

Kind = Literal[
    "call",
    "joining",
    "building",
    "unrecorded",
    "stopped",
    "unreachable",
    "killed",
    "ended",
    "missing",
    "disk",
    "elsewhere",
    "silent",
]
WAITING: frozenset[Kind] = frozenset({"call", "joining", "building", "unrecorded"})


@dataclass(frozen=True)
class State:
    """The state of one rank.

    Attributes:
        rank: global.
        kind: `"call"` in a collective, send or receive; `"joining"` in `init_process_group`; `"building"` in
            `new_group` and the like; `"unrecorded"` in a function of torch.distributed that is not recorded;
            `"killed"` by a signal or an error, `"ended"` normally; `"missing"` if it never started;
            `"silent"` if nothing is known of a living process.
        words: to follow the rank's name: `is asleep in time.sleep`.
        frames: the user's own, innermost first.
        call: the one that it waits in.
        since_s: how long it has waited in the call.
        waits_for: ranks that have not arrived.
        operation: name of what it waits in; empty if it does not wait.
    """

    rank: int
    kind: Kind
    words: str
    frames: tuple[Frame, ...] = ()
    call: Call | None = None
    group: Group | None = None
    since_s: float = 0.0
    waits_for: frozenset[int] = frozenset()
    operation: str = ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.kind in WAITING

    @property
    def is_in_backward(self) -> bool:
        """Whether autograd issued the call that it waits in."""
        return self.call is not None and is_bucket(self.call.frames)


def find_states(seen: Seen, source: Source) -> dict[int, State]:
    """Return the state of each rank of a job, by rank."""
    ranks = sorted({*range(seen.world_size), *seen.processes, *seen.reports})
    found = {rank: _find_state(rank, seen, source) for rank in ranks}
    return {rank: _link(state, found, seen) for rank, state in found.items()}


def _find_state(rank: int, seen: Seen, source: Source) -> State:
    process, report = seen.processes.get(rank), seen.reports.get(rank)
    main = _find_main_stack(process, report, source)
    own = own_frames(main)
    if process is None and report is None:
        return State(rank, "missing", "was never started")
    outside = None if process is None else _see_from_outside(process, own, report)
    if outside is not None:
        return outside
    if report is not None and report.phase == "leaving":
        where = find_activity(main, source)
        words = "has reached the end of its script" + (f", and {where}" if where else "")
        return State(rank, "ended", words, frames=own)
    building, is_in_init = find_building(main), is_joining(main)
    if is_in_init or (report is not None and report.phase == "joining"):
        return State(
            rank, "joining", "waits in init_process_group", frames=own, operation="init_process_group"
        )
    if building is not None and not _is_in_call(main, report):
        return State(rank, "building", f"waits in {building}", frames=own, operation=building)
    if report is not None and report.phase == "starting":
        return State(rank, "elsewhere", "has not reached the first line of its script yet", frames=own)
    call = None if report is None else _find_wait(main, report, process, source, seen)
    if call is not None and report is not None:
        return _describe_wait(rank, call, report, own)
    workers = process.native if process is not None and report is not None and report.stacks else ()
    state = _describe_activity(rank, main, process, source, workers)
    if report is not None and report.action:
        state = replace(state, words=f"{state.words}, in {report.action}")
    return state


def _find_main_stack(process: Process | None, report: Report | None, source: Source) -> tuple[Frame, ...]:
    if report is not None and report.stacks:
        return report.stacks[0].frames
    native = () if process is None else process.native
    # The interpreter's signal handler writes lines without their text.
    return tuple(replace(f, text=f.text or source.line(f.file, f.line)) for f in native)


def _see_from_outside(process: Process, own: tuple[Frame, ...], report: Report | None) -> State | None:
    """Return the state that follows from the process's state alone, else `None`."""
    rank = process.rank
    if process.state == "unreachable":
        return State(rank, "unreachable", f"is on {process.node}, which does not answer")
    if process.state == "ended":
        words = name_exit(process.exit_code)
        last = None if report is None else report.last
        if last is not None and last.kind != "abort" and not last.follower:
            words = last.words
        # Only a last report is from its end.
        frames = own if last is not None else ()
        return State(rank, "ended" if process.exit_code in (0, None) else "killed", words, frames=frames)
    if process.pid == 0:
        return State(rank, "missing", "was never started")
    if process.state == "stopped":
        return State(rank, "stopped", "is stopped (SIGSTOP, Ctrl-Z or a debugger)", frames=own)
    if process.state == "uninterruptible" and report is None:
        return State(rank, "disk", "waits in the kernel for a disk or a network drive", frames=own)
    return None


def _is_in_call(main: Sequence[Frame], report: Report | None) -> bool:
    """Return whether a recorded call was issued below the function that the main thread is in."""
    return report is not None and any(
        not call.done and own_frames(call.frames)[:1] == own_frames(main)[:1] for call in report.calls
    )


def _find_wait(
    main: Sequence[Frame], report: Report, process: Process | None, source: Source, seen: Seen
) -> Call | None:
    """Return the unfinished call that a rank waits in; none if it has issued some but does something else."""
    open_calls = [call for call in report.calls if not call.done]
    if not open_calls:
        return None
    awaited = [call for call in open_calls if report.awaited and call.purpose == report.awaited]
    if awaited:  # others may be open too: a stage sends without waiting, and receives ahead
        return min(awaited, key=lambda call: (call.began_s, call.number))
    own = own_frames(main)
    same_line = [
        call for call in open_calls if own and _lines(own_frames(call.frames))[:1] == _lines(own)[:1]
    ]

    def order(call: Call) -> tuple[bool, float, int]:
        # Of several messages under way at once, the one that the other side has not issued is what keeps it.
        is_met = is_pairwise(call) and call.peer is not None and _has_counterpart(call, report.rank, seen)
        return is_met, call.began_s, call.number

    first = min(same_line or open_calls, key=order)
    # On another line than its call, a rank waits only if its thread is in torch, or shows no work of its own.
    if same_line or not main or is_in_torch(main) or waits_for_device(main, source):
        return first
    if find_activity(main, source) is not None:
        threads = [stack.frames for stack in report.stacks[1:] if is_in_torch(stack.frames)]
        return first if threads else None
    is_busy = process is not None and process.cpu_share >= BUSY_SHARE
    return None if is_busy else first


def _lines(frames: Sequence[Frame]) -> list[tuple[str, int]]:
    return [(frame.file, frame.line) for frame in frames]


def _describe_wait(rank: int, call: Call, report: Report, own: tuple[Frame, ...]) -> State:
    group = report.groups.get(call.group)
    detail = describe_tensors(call)
    name = name_call(call, name_label(group, call.group))
    # Of a rank that is gone, the report is from its end.
    waits = "waits" if report.last is None else "waited"
    words = f"{waits} in {name}" + (f" ({detail})" if detail else "")
    if call.purpose:
        words = f"{waits} {name_purpose(call)} ({name})"
    if is_bucket(call.frames):
        words += ", in backward"
    return State(
        rank,
        "call",
        words,
        frames=own_frames(call.frames) or own,
        call=call,
        group=group,
        since_s=max(0.0, report.time_s - call.began_s),
        operation=call.operation,
    )


def _describe_activity(
    rank: int,
    main: tuple[Frame, ...],
    process: Process | None,
    source: Source,
    worker: tuple[Frame, ...],
) -> State:
    own = own_frames(main)
    activity = find_activity(main, source)
    if activity is not None and own_frames(worker):
        # The interpreter's signal handler writes lines without their text.
        stack = tuple(replace(f, text=source.line(f.file, f.line)) for f in worker)
        doing, at = find_activity(stack, source), own_frames(stack)[0]
        does = "is" if doing is None else doing
        words = f"{activity}, whose worker {does} at `{at.text}` ({name_line(at)})"
        return State(rank, "elsewhere", words, own)
    if activity is not None:
        return State(rank, "elsewhere", activity, own)
    if not main:
        return State(rank, "silent", "is alive but does not respond")
    distributed = find_distributed(main)
    if distributed is not None:
        return State(rank, "unrecorded", f"waits in {distributed}", frames=own, operation=distributed)
    share = 0.0 if process is None else process.cpu_share
    if process is not None and process.state == "uninterruptible":
        return State(rank, "disk", "waits in the kernel for a disk or a network drive", frames=own)
    if share >= BUSY_SHARE:
        return State(rank, "elsewhere", f"computes ({share * 100:.0f}% of a core)", own)
    return State(rank, "elsewhere", "is idle (uses no CPU)", own)


# ---- the ranks that a rank waits for


def _link(state: State, found: Mapping[int, State], seen: Seen) -> State:
    if state.kind == "call":
        waits_for = _find_absent(state, found, seen)
    elif state.waits:
        # All ranks have to arrive, as far as is known; those in the same function have arrived.
        waits_for = frozenset(
            rank for rank, s in found.items() if (s.kind, s.operation) != (state.kind, state.operation)
        )
    else:
        return state
    return State(**{**vars(state), "waits_for": (waits_for & found.keys()) - {state.rank}})


def _find_absent(state: State, found: Mapping[int, State], seen: Seen) -> frozenset[int]:
    """Return members that have not issued a rank's call, or else those that can no longer take part."""
    call = state.call
    assert call is not None
    if is_pairwise(call):
        if call.peer is not None:
            return frozenset() if _has_counterpart(call, state.rank, seen) else frozenset({call.peer})
        members = state.group.ranks if state.group is not None else tuple(found)
        came = {rank for rank in members if _has_counterpart(call, state.rank, seen, rank)}
        return frozenset() if came else frozenset(members)
    members = state.group.ranks if state.group is not None else tuple(found)
    absent = {rank for rank in members if rank in found and _count_issued(rank, call, seen) < call.number}
    lost = {"stopped", "unreachable", "killed", "ended"}
    return frozenset(absent or {rank for rank in members if rank in found and found[rank].kind in lost})


def _count_issued(rank: int, call: Call, seen: Seen) -> int:
    """Return the number of the latest call that a rank has issued in a call's sequence."""
    report, sequence = seen.reports.get(rank), sequence_of(call)
    calls = () if report is None else report.calls
    return max((c.number for c in calls if c.group == call.group and sequence_of(c) == sequence), default=0)


def _has_counterpart(call: Call, rank: int, seen: Seen, peer: int | None = None) -> bool:
    """Return whether the other side has issued the receive of a send, or the send of a receive."""
    report = seen.reports.get(call.peer if peer is None and call.peer is not None else peer or 0)
    opposite = "recv" if call.operation.startswith("send") else "send"
    return report is not None and any(
        other.group == call.group
        and other.operation.startswith(opposite)
        # A receive from any rank is counted separately from those from one rank.
        and (other.number >= call.number if other.peer == rank else other.peer is None and not other.done)
        for other in report.calls
    )


def count_transfers(waiting: Sequence[State], seen: Seen) -> list[str]:
    """Return, for ranks in a send or receive, how many of these the other side has had."""
    out = []
    for state in waiting:
        call = state.call
        report = seen.reports.get(call.peer) if call is not None and call.peer is not None else None
        if call is None or report is None or not is_pairwise(call):
            continue
        sends = call.operation.startswith("send")
        opposite = "recv" if sends else "send"
        so_far = max(
            (
                other.number
                for other in report.calls
                if (other.group, other.peer) == (call.group, state.rank)
                and other.operation.startswith(opposite)
            ),
            default=0,
        )
        number = f"{so_far} tensor{'s' if so_far > 1 else ''}" if so_far else "nothing"
        did, does = (f"received {number} from", "sends") if sends else (f"sent {number} to", "waits for")
        own = f"rank {state.rank}"
        out.append(f"Rank {call.peer} has {did} {own} so far; {own} {does} number {call.number}.")
    return out
