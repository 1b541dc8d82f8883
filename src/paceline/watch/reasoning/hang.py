"""Explains a hang: finds the rank that all others wait for, directly or indirectly.

Ranks wait for those that have not reached their collective. Following this from rank to rank ends at a rank
that waits for no other, or in a cycle. Either is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.phrases import join, name_ranks
from paceline.units import format_wait
from paceline.watch.protocol.report import Seen, Verdict
from paceline.watch.protocol.words import is_pairwise, name_place, name_purpose, pick
from paceline.watch.reasoning.clues import Side, explain_joining, list_clues, list_lines
from paceline.watch.reasoning.group_names import explain_building, explain_groups
from paceline.watch.reasoning.mismatch import (
    ROOT_FIX,
    ROOT_RULE,
    ROOTED,
    find_mismatch,
    find_stuck_mismatch,
    merge_groups,
)
from paceline.watch.reasoning.source import Source
from paceline.watch.reasoning.stage_waits import FIX, RULE, find_stage_mismatch
from paceline.watch.reasoning.states import Kind, State, count_transfers, find_states
from paceline.watch.reasoning.verdict import (
    build_verdict,
    find_fix,
    list_places,
    name_at,
    name_state,
    name_states,
    name_wait,
)

# If several ranks are waited for, the first of these kinds is the cause and the others are its consequences.
_GRAVITY: tuple[Kind, ...] = (
    "killed",
    "unreachable",
    "missing",
    "stopped",
    "disk",
    "elsewhere",
    "silent",
    "ended",
    "call",
)


# More ranks than this are counted rather than listed, if the places list them already.
_MANY = 8


def explain_hang(seen: Seen, read_source: Callable[[str], Sequence[str]] | None = None) -> Verdict | None:
    """Return the verdict on a job without progress on any rank; `None` if all ranks have ended.

    Args:
        read_source: returns the lines of a source file, or none if it cannot be read. With it, the code
          around the ranks' lines shows likely causes.
    """
    source = Source(read_source)
    verdict = _explain(seen, read_source, source)
    counts = {rank: r.num_microbatches for rank, r in seen.reports.items() if r.num_microbatches}
    if verdict is None or len(set(counts.values())) < 2:
        return verdict
    listed = join([f"rank {rank} has {count}" for rank, count in sorted(counts.items())])
    likely = f"Likely cause: the ranks' schedules have different numbers of microbatches: {listed}."
    return replace(
        verdict,
        more=(likely, *(text for text in verdict.more if not text.startswith("Likely cause"))),
        rule="All stages of a pipeline exchange one tensor for each microbatch of a step.",
        fix="Give the schedule of each rank the same n_microbatches.",
    )


def _explain(
    seen: Seen, read_source: Callable[[str], Sequence[str]] | None, source: Source
) -> Verdict | None:
    states = find_states(seen, source)
    if all(state.kind in ("ended", "killed") for state in states.values()):
        return None
    # First the causes that can make any rank wait: groups that not all ranks have made, and calls that do
    # not match. Without them, the waits are followed to the rank that causes them.
    made_apart = explain_groups(states, seen)
    if made_apart is not None:
        return made_apart
    calls = {rank: report.calls for rank, report in seen.reports.items()}
    merged = merge_groups(seen.reports)
    mismatch = (
        find_mismatch(calls, merged, read_source)
        or find_stage_mismatch(calls)
        or find_stuck_mismatch(calls, merged, read_source)
    )
    if mismatch is not None:
        shown = {rank for place in mismatch.places for rank in place.ranks}
        rest = list_places(state for rank, state in states.items() if rank not in shown)
        return replace(mismatch, places=(*mismatch.places, *rest))
    waiting = [state for state in states.values() if state.waits]
    if not waiting:
        return _explain_still(states, seen)
    # A chain of waits ends at a rank that waits for no other, at a call that all have made, or in a cycle.
    roots = find_roots(states)
    if roots:
        return _explain_roots(roots, states, seen, source)
    stuck = [state for state in waiting if not state.waits_for]
    if stuck:
        return _explain_stuck(stuck, states, seen, source)
    return _explain_cycle(find_cycle(states), states, seen, source)


def find_roots(states: Mapping[int, State]) -> list[State]:
    """Return the ranks at one place that wait for no other and that most ranks wait for, directly or not."""
    reached = {rank: _reach(rank, states) for rank in states}
    counts = {
        rank: sum(rank in found for found in reached.values()) for rank, s in states.items() if not s.waits
    }
    candidates = [states[rank] for rank, count in counts.items() if count]
    if not candidates:
        return []
    # The most waited-for rank first. With equal counts the kind decides: a dead rank explains a late one, but
    # not the other way round.
    gravest = min(candidates, key=lambda s: (-counts[s.rank], _GRAVITY.index(s.kind), s.rank))
    return [s for s in candidates if _is_alike(s, gravest)]


def _is_alike(state: State, other: State) -> bool:
    return (state.kind, state.words, state.frames[:1]) == (other.kind, other.words, other.frames[:1])


def _reach(rank: int, states: Mapping[int, State]) -> set[int]:
    """Return all ranks that one waits for, directly or not."""
    found: set[int] = set()
    ahead = set(states[rank].waits_for)
    while ahead:
        found |= ahead
        ahead = {other for r in ahead if r in states for other in states[r].waits_for} - found
    return found


def find_cycle(states: Mapping[int, State]) -> list[State]:
    """Return a shortest cycle of ranks in which each waits for the next, and the last for the first."""
    best: list[int] = []
    # A breadth-first search from each rank, cut off at the length of the best cycle so far.
    for start in states:
        paths = [[start]]
        known = {start}
        while paths and not (best and len(paths[0]) >= len(best)):
            path = paths.pop(0)
            ahead = sorted(states[path[-1]].waits_for)
            if start in ahead:
                best = path
                break
            paths += [[*path, rank] for rank in ahead if rank not in known and rank in states]
            known |= set(ahead)
    return [states[rank] for rank in best]


# ---- the verdicts


def _explain_roots(roots: list[State], states: Mapping[int, State], seen: Seen, source: Source) -> Verdict:
    """Return the verdict on ranks that wait, directly or not, for `roots`, which wait for no other."""
    ranks = {state.rank for state in roots}
    direct = _pick_waiters([s for s in states.values() if s.waits_for & ranks])
    missing = [state for state in roots if state.rank in direct[0].waits_for]
    first, root = direct[0], missing[0]
    code = _choose_code(first, root)
    who, waiting = name_ranks(s.rank for s in missing), _name_waiting(direct, seen)
    is_staged = first.call is not None and bool(first.call.purpose)
    where = "for which" if is_staged else "where"
    headline = f"{who} {_name_absence(first, root, seen)}, {where} {waiting}: {name_state(missing)}"
    more = [*count_transfers(direct[:1], seen), *_list_clues(direct, missing, seen, source)]
    more += _describe_others(ranks, direct, states)
    rule, fix = "", _name_fix(code, root, seen)
    if is_staged and code == "PL808":
        rule, fix = RULE, f"Check rank {root.rank}{name_at(root.frames)}: why does it not continue there?"
    return build_verdict(code, headline, list_places(states.values()), rule=rule, fix=fix, more=more)


def _pick_waiters(waiting: list[State]) -> list[State]:
    """Return, of ranks that wait for the same others, the largest set that is in one call."""
    by_call: dict[tuple[str, str, int, int | None], list[State]] = {}
    for state in waiting:
        call = state.call
        key: tuple[str, str, int, int | None] = (state.operation, "", 0, None)
        if call is not None:
            key = (state.operation, call.group, call.number, state.rank if is_pairwise(call) else None)
        by_call.setdefault(key, []).append(state)
    return max(
        by_call.values(), key=lambda states: (len(states), max(s.since_s for s in states), -states[0].rank)
    )


def _choose_code(waiter: State, root: State) -> str:
    if root.kind == "stopped":
        return "PL809"
    if root.kind == "unreachable":
        return "PL812"
    if waiter.kind == "joining" or root.kind == "missing":
        return "PL810"
    if root.kind == "killed":
        return "PL801"
    if waiter.kind == "building":
        return "PL807"
    if waiter.call is not None and is_pairwise(waiter.call):
        return "PL808"
    return "PL801" if root.kind == "ended" else "PL800"


def _name_absence(waiter: State, root: State, seen: Seen) -> str:
    """Return what the missing ranks did not do."""
    call = waiter.call
    if call is None:
        return f"never reached {waiter.operation}"
    if call.purpose:
        return f"never {'took' if call.operation.startswith('send') else 'sent'} {call.purpose}"
    if is_pairwise(call):
        if call.operation.startswith("send"):
            return f"never received the message of rank {waiter.rank} ({name_wait(waiter, seen.world_size)})"
        return f"never sent what rank {waiter.rank} waits for ({name_wait(waiter, seen.world_size)})"
    report = seen.reports.get(root.rank)
    if report is not None and any(c.group == call.group and c.number >= call.number for c in report.calls):
        return f"does not finish {name_wait(waiter, seen.world_size)}"
    return f"never reached {name_wait(waiter, seen.world_size)}"


def _name_waiting(waiters: Sequence[State], seen: Seen) -> str:
    """Return how long ranks have waited: `ranks 0, 1 and 3 have waited 62 s at train.py:31 in step`."""
    have = pick([s.rank for s in waiters], "has", "have")
    who = name_ranks(s.rank for s in waiters)
    return f"{who} {have} waited {_name_since(waiters, seen)}{name_at(waiters[0].frames)}"


def _name_since(waiters: Sequence[State], seen: Seen) -> str:
    return format_wait(max(max(state.since_s for state in waiters), seen.quiet_s))


def _name_fix(code: str, root: State, seen: Seen) -> str:
    process = seen.processes.get(root.rank)
    fix = find_fix(code)
    if code == "PL809" and process is not None:
        return f"On {process.node}: {fix.replace('PID', str(process.pid))}"
    if root.kind == "killed":
        return "Find out what ended the rank: its own output is above; the others only wait for it."
    if code == "PL800" and root.kind == "elsewhere" and root.frames:
        return f"Check {name_place(root.frames[0])}: why does rank {root.rank} not continue there?"
    return fix


def _list_clues(waiters: Sequence[State], missing: Sequence[State], seen: Seen, source: Source) -> list[str]:
    group = waiters[0].call.group if waiters[0].call is not None else ""
    here, there = _to_side(waiters, seen, group), _to_side(missing, seen, group)
    if waiters[0].kind == "joining":
        return explain_joining(here, there, source)
    calls = [state.call for state in (*waiters[:1], *missing[:1]) if state.call is not None]
    is_usual = any(is_pairwise(call) and call.number > 1 for call in calls)
    # If the waiting ranks' lines show nothing, the other rank's way to its exit may.
    return list_clues(here, there, source, is_usual=is_usual) or (
        list_clues(there, here, source) if there.has_ended and there.frames else []
    )


def _to_side(states: Sequence[State], seen: Seen, group: str) -> Side:
    if not states:
        return Side(())
    first = states[0]
    ranks = tuple(state.rank for state in states)
    report = seen.reports.get(first.rank)
    lines = {} if report is None else list_lines(report.calls, group)
    return Side(ranks, first.frames, first.is_in_backward, first.kind == "ended", lines)


def _describe_others(roots: set[int], direct: Sequence[State], states: Mapping[int, State]) -> list[str]:
    """Return sentences on the ranks that wait indirectly, and on further ranks that are waited for."""
    shown = {state.rank for state in direct}
    behind = [
        s.rank for s in states.values() if s.waits and s.rank not in shown and _reach(s.rank, states) & roots
    ]
    out = []
    if behind:
        who = name_ranks(behind).capitalize() if len(behind) <= _MANY else f"{len(behind)} other ranks"
        out.append(f"{who} {pick(behind, 'waits', 'wait')} for the same rank indirectly, in other calls.")
    awaited = {rank for state in states.values() for rank in state.waits_for}
    others = [s for s in states.values() if s.rank in awaited - roots and not s.waits]
    while others:
        alike = [s for s in others if _is_alike(s, others[0])]
        out.append(f"Also waited for: {name_states(alike)}.")
        others = [s for s in others if s not in alike]
    return out


def _explain_cycle(cycle: list[State], states: Mapping[int, State], seen: Seen, source: Source) -> Verdict:
    """Return the verdict on ranks that wait for each other in a cycle, each for the next one."""
    kinds = {state.kind for state in cycle}
    if "building" in kinds:
        builders = _pick_waiters([s for s in states.values() if s.kind == "building"])
        others = [s for s in states.values() if s.rank in builders[0].waits_for]
        return _explain_absent(builders, others, "PL807", states, seen, source)
    if "joining" in kinds:
        joining = [s for s in states.values() if s.kind == "joining"]
        others = [s for s in states.values() if s.rank in joining[0].waits_for]
        return _explain_absent(joining, others, "PL810", states, seen, source)
    is_pairs = any(s.call is not None and is_pairwise(s.call) for s in cycle)
    code = "PL808" if is_pairs else "PL802" if "unrecorded" in kinds else "PL806"
    steps = [
        _name_step(state, cycle[(number + 1) % len(cycle)], seen.world_size)
        for number, state in enumerate(cycle)
    ]
    is_staged = any(s.call is not None and s.call.purpose for s in cycle)
    clues = _list_clues(cycle[:1], cycle[1:2], seen, source)
    back = _list_clues(cycle[1:2], cycle[:1], seen, source)
    # A rank that has left the others' loop calls other groups than they: their order is not the cause.
    left = next((each for each in (clues, back) if any(" left the loop at " in clue for clue in each)), None)
    if code == "PL806" and left is not None:
        code, clues = "PL802", left
    headline = f"{name_ranks(s.rank for s in cycle)} have waited {_name_since(cycle, seen)} for each other: "
    return build_verdict(
        code,
        headline + ", and ".join(steps),
        list_places(states.values()),
        rule=RULE if is_staged else "",
        fix=FIX if is_staged else "",
        more=[*count_transfers(cycle, seen), *clues],
    )


def _name_step(state: State, following: State, world_size: int) -> str:
    """Return one step of a cycle: `rank 0 waits in recv number 3 from rank 1 at train.py:31 for rank 1`."""
    where = name_at(state.frames)
    if state.call is not None and state.call.purpose:
        return f"rank {state.rank} waits {name_purpose(state.call)} (rank {following.rank}){where}"
    return f"rank {state.rank} waits in {name_wait(state, world_size)}{where} for rank {following.rank}"


def _explain_absent(
    waiters: list[State],
    others: list[State],
    code: str,
    states: Mapping[int, State],
    seen: Seen,
    source: Source,
) -> Verdict:
    """Return the verdict on ranks in a call that others, which wait elsewhere, never reached."""
    alike = [s for s in others if _is_alike(s, others[0])]
    who, waiting = name_ranks(s.rank for s in alike), _name_waiting(waiters, seen)
    headline = f"{who} never reached {waiters[0].operation}, where {waiting}: {name_state(alike)}"
    clues = _list_clues(waiters, alike, seen, source)
    return build_verdict(code, headline, list_places(states.values()), more=clues)


def _explain_apart(
    joining: list[State], states: Mapping[int, State], seen: Seen, source: Source
) -> Verdict | None:
    """Return the verdict on ranks that expect different addresses, ports or numbers of ranks."""
    places: dict[str, list[State]] = {}
    for state in joining:
        report = seen.reports.get(state.rank)
        if report is not None and report.meets:
            places.setdefault(report.meets, []).append(state)
    if len(places) < 2:
        return None
    # Most ranks wait at the intended place; with equal numbers, the place of rank 0 counts as intended.
    (most, waiters), *others = sorted(
        places.items(), key=lambda item: (-len(item[1]), min(s.rank for s in item[1]))
    )
    strays = [state for _, stray in others for state in stray]
    where = "; ".join(f"{name_ranks(s.rank for s in stray)} at {place}" for place, stray in others)
    headline = (
        f"ranks try to meet at different addresses: {where}; {name_ranks(s.rank for s in waiters)} at "
        f"{most}: {_name_waiting(waiters, seen)} in init_process_group"
    )
    clues = _list_clues(waiters, strays, seen, source)
    return build_verdict("PL810", headline, list_places(states.values()), more=clues)


def _explain_stuck(stuck: list[State], states: Mapping[int, State], seen: Seen, source: Source) -> Verdict:
    """Return the verdict on ranks that wait although every rank they wait for has arrived."""
    first = _pick_waiters(stuck)[0]
    same = [s for s in stuck if s.operation == first.operation]
    since = _name_since(same, seen)
    who = name_ranks(s.rank for s in same)
    if first.kind == "joining":
        given = {s.rank: seen.reports[s.rank].joins_as for s in same if s.rank in seen.reports}
        numbers = [number for number in given.values() if number >= 0]
        twice = next((number for number in numbers if numbers.count(number) > 1), None)
        if twice is not None:
            both = [rank for rank, number in given.items() if number == twice]
            return build_verdict(
                "PL810",
                f"{name_ranks(both)} join as rank {twice}{name_at(first.frames)}, and {who} "
                f"{pick([s.rank for s in same], 'has', 'have')} waited {since} in init_process_group",
                list_places(states.values()),
                rule="Each rank joins under a number of its own, from 0 to the world size less one.",
                fix="Leave rank= out, or take it from RANK, which `paceline run` sets.",
                more=_list_clues(same, [], seen, source),
            )
        apart = _explain_apart(same, states, seen, source)
        if apart is not None:
            return apart
        headline = (
            f"{who} {pick([s.rank for s in same], 'has', 'have')} waited {since} in init_process_group"
            f"{name_at(first.frames)}, and none of the {seen.world_size} is missing: they wait for more "
            "ranks, or try to meet at different addresses"
        )
        return build_verdict(
            "PL810", headline, list_places(states.values()), more=_list_clues(same, [], seen, source)
        )
    headline = (
        f"all ranks have reached {name_wait(first, seen.world_size)}{name_at(first.frames)}, but it has not "
        f"completed for {since}"
    )
    if first.kind == "building":
        apart = explain_building(same, headline, states, seen)
        if apart is not None:
            return apart
    if first.operation not in ROOTED:
        return build_verdict("PL813", headline, list_places(states.values()))
    return build_verdict(
        "PL802",
        f"{headline}: the ranks seem to give different roots (src= or dst=)",
        list_places(states.values()),
        rule=ROOT_RULE,
        fix=ROOT_FIX,
    )


def _explain_still(states: Mapping[int, State], seen: Seen) -> Verdict:
    """Return the verdict on a job in which no rank waits in a collective and none makes progress."""
    living = [s for s in states.values() if s.kind not in ("ended", "killed")]
    grave = min(living, key=lambda s: (_GRAVITY.index(s.kind), s.rank))
    alike = [s for s in living if _is_alike(s, grave)]
    code = {"stopped": "PL809", "unreachable": "PL812", "missing": "PL810"}.get(grave.kind, "PL811")
    headline = f"no rank waits in a collective, and none has made progress for {format_wait(seen.quiet_s)}: "
    return build_verdict(
        code, headline + name_states(alike), list_places(states.values()), fix=_name_fix(code, grave, seen)
    )
