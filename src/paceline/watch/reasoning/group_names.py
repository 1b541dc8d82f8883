"""Explains why ranks that make process groups do not meet: their calls of `new_group` differ.

torch names a group by counting the calls on each rank. A rank that skips a call gives its later groups the
names that earlier groups have on other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.phrases import join, name_ranks
from paceline.units import format_wait
from paceline.watch.protocol.report import Frame, Group, Seen, Verdict
from paceline.watch.protocol.words import pick
from paceline.watch.reasoning.mismatch import find_partial_group, find_shared_names, find_skipped_group
from paceline.watch.reasoning.states import State
from paceline.watch.reasoning.verdict import build_verdict, list_places, name_at


def explain_groups(states: Mapping[int, State], seen: Seen) -> Verdict | None:
    """Return the verdict if one name means different groups on different ranks, else `None`.

    Args:
        states: by rank.
    """
    shared = find_shared_names({rank: report.groups for rank, report in seen.reports.items()})
    if shared is not None:
        return _explain_shared_name(*shared, states, seen)
    building = [state.rank for state in states.values() if state.kind == "building"]
    skipped = find_skipped_group(seen.reports, building)
    return None if skipped is None else _explain_skipped_group(*skipped, states, seen)


def explain_building(
    waiters: Sequence[State], headline: str, states: Mapping[int, State], seen: Seen
) -> Verdict | None:
    """Return the verdict if all ranks are making a group and none finishes; `None` if the cause is unknown.

    Args:
        waiters: ranks that are making a group.
        headline: reports that they are there and do not continue.
        states: by rank.
    """
    by_line: dict[tuple[Frame, ...], list[int]] = {}
    for state in waiters:
        by_line.setdefault(state.frames[:1], []).append(state.rank)
    places = list_places(states.values())
    if len(by_line) > 1 and () not in by_line:
        # The call in a branch is more likely that of the fewest ranks.
        (line, few), *others = sorted(by_line.items(), key=lambda item: (len(item[1]), item[1]))
        rest = sorted(rank for _, ranks in others for rank in ranks)
        since = format_wait(max(max(state.since_s for state in waiters), seen.quiet_s))
        what = waiters[0].operation
        where = [
            f"{name_ranks(ranks)} {pick(ranks, 'waits', 'wait')} in {what}{name_at(other)}"
            for other, ranks in others
        ]
        headline = (
            f"{name_ranks(rest)} never reached {what}{name_at(line)}, where {name_ranks(few)} "
            f"{pick(few, 'has', 'have')} waited {since}: {join(where)}"
        )
        return build_verdict("PL807", headline, places)
    partial = find_partial_group({rank: report.groups for rank, report in seen.reports.items()})
    if partial is None:
        return None
    name, members = partial
    headline = (
        f"{headline}: the ranks seem to have called it in different ways before, as {name_ranks(members)} "
        f"{pick(members, 'has', 'have')} made group {name}, which the others may not have counted"
    )
    return build_verdict("PL807", headline, places)


def _explain_shared_name(
    name: str, groups: dict[int, Group], states: Mapping[int, State], seen: Seen
) -> Verdict:
    """Return the verdict on ranks that have made different groups under one name."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, group in groups.items():
        parts.setdefault(group.ranks, []).append(rank)
    made = [
        f"a group of {name_ranks(members)} on {name_ranks(who)}{_name_maker(name, who, seen)}"
        for members, who in parts.items()
    ]
    names = f"number {name} is {join(made)}"
    # Only ranks whose latest call has that number: others may have reached it under another one.
    latest = {rank for rank, report in seen.reports.items() if str(report.num_named - 1) == name}
    skipped = []
    for members in parts:
        # A member without a group of this name may be making it now.
        absent = [
            rank
            for rank in sorted(latest)
            if (groups[rank].ranks != members if rank in groups else rank not in members)
        ]
        if absent:
            who = name_ranks(absent)
            skipped.append(f"{who} never called new_group for the group of {name_ranks(members)}")
    cause = join(skipped) if skipped else "the ranks have called new_group in different ways"
    return build_verdict("PL807", f"{cause}: {names}", list_places(states.values()))


def _explain_skipped_group(
    group: Group, makers: Sequence[int], behind: Sequence[int], states: Mapping[int, State], seen: Seen
) -> Verdict:
    """Return the verdict on ranks making a group under a name that others gave to a group these skipped."""
    first = states[behind[0]]
    who = name_ranks(behind)
    headline = (
        f"{who} never called new_group for group number {group.name}, of {name_ranks(group.ranks)}, which "
        f"{name_ranks(makers)} made{_name_maker(group.name, makers, seen)}; now {who} "
        f"{pick(behind, 'waits', 'wait')} in {first.operation}{name_at(first.frames)}, and the ranks' names "
        "of groups differ"
    )
    return build_verdict("PL807", headline, list_places(states.values()))


def _name_maker(name: str, ranks: Sequence[int], seen: Seen) -> str:
    """Return where the first of these ranks made a group: ` at train.py:12 in build`."""
    report = seen.reports.get(ranks[0])
    frame = None if report is None else report.made_at.get(name)
    return "" if frame is None else name_at((frame,))
