"""Detects mismatched collectives: compares the ranks' calls by their number in the group's sequence.

A rank that is behind has no call with a number yet, and one whose buffer is full has lost its old ones, so
only numbers that ranks have in common are compared. torch's name of an operation depends on the path and the
backend (ProcessGroup*.cpp, `opTypeToString`); unknown names never count as different.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.phrases import join, name_ranks
from paceline.watch.protocol.report import Call, Frame, Group, Report, SharedPlace, Verdict
from paceline.watch.protocol.words import (
    describe_tensors,
    name_group,
    name_place,
    own_frames,
    pick,
    sequence_of,
)
from paceline.watch.reasoning.activity import is_bucket
from paceline.watch.reasoning.clues import Side, list_clues, list_lines
from paceline.watch.reasoning.source import Source
from paceline.watch.reasoning.verdict import build_verdict

# Gloo and NCCL use one operation for all names in a row. Coalesced ones may mean any, so they are not here.
_ROWS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_coalesced"),
    "broadcast": ("broadcast", "_broadcast_oop"),
    "reduce": ("reduce", "_reduce_oop"),
    "all_gather": (
        "all_gather",
        "allgather",
        "_allgather_base",
        "_all_gather_base",
        "all_gather_single",
        "all_gather_into_tensor",
        "all_gather_v",
    ),
    "reduce_scatter": (
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "reduce_scatter_v",
    ),
    "all_to_all": (
        "all_to_all",
        "alltoall",
        "alltoall_base",
        "all_to_all_single",
        "all_to_all_v_single",
    ),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "all_reduce_barrier"),
    "sparse_all_reduce": ("sparse_all_reduce",),
}
OPERATIONS = {name: row for row, names in _ROWS.items() for name in names}
# NCCL accepts lists of tensors with different sizes in the other two.
SIZES_NEVER_DIFFER = {"all_reduce", "broadcast", "reduce"}
_EQUAL_SIZES = SIZES_NEVER_DIFFER | {"all_gather", "reduce_scatter"}
# Only the source of a scatter has inputs.
EQUAL_DTYPES = _EQUAL_SIZES | {"all_to_all", "gather"}
_ALIKE = {"all_reduce", "reduce_scatter"}
REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
ROOT_RULE = "A broadcast, reduce, gather or scatter needs one root, the same on all ranks of its group."
ROOT_FIX = "Print the root on each rank before the call, or choose it on one rank and broadcast it."
# NCCL handles these as one dtype.
_SAME_DTYPES = {"bool": "uint8"}

Reader = Callable[[str], Sequence[str]]


def find_mismatch(
    calls: Mapping[int, Sequence[Call]],
    groups: Mapping[str, Group],
    read_source: Reader | None = None,
    *,
    is_running: bool = False,
) -> Verdict | None:
    """Return the first call that does not match among the ranks of a group; `None` without a known mismatch.

    Args:
        calls: by rank, in any order.
        groups: by name; unknown ones are compared over all ranks that use them.
        read_source: as in `explain_hang`.
        is_running: whether the job is running: then only what is wrong with every backend counts.
    """
    found: list[tuple[float, str, dict[int, Call]]] = []
    for name, by_number in _sort_collectives(calls).items():
        members = groups[name].ranks if name in groups else None
        for _, by_rank in sorted(by_number.items()):
            known = {rank: c for rank, c in sorted(by_rank.items()) if members is None or rank in members}
            code = _compare(known, calls, SIZES_NEVER_DIFFER if is_running else _EQUAL_SIZES)
            if code is None and find_split(known, members or sorted(calls)):
                code = "PL803"
            if code is not None:
                found.append((min(call.began_s for call in known.values()), code, known))
                break  # later calls of this group are shifted against each other, and would differ too
    if not found:
        return None
    # The earliest one: what happens in other groups afterwards may follow from it.
    _, code, by_rank = min(found, key=lambda item: item[0])
    name = next(iter(by_rank.values())).group
    group = groups.get(name)
    lines = {rank: list_lines(issued, name) for rank, issued in calls.items()}
    split = find_split(by_rank, group.ranks if group is not None and group.ranks else sorted(calls))
    if code == "PL803" and split:
        return _explain_split(by_rank, name_group(group, name, len(calls)), split)
    return _explain(code, by_rank, name_group(group, name, len(calls)), Source(read_source), lines)


def merge_groups(reports: Mapping[int, Report]) -> dict[str, Group]:
    """Return the groups of all ranks by name.

    If ranks gave one name to groups of different members, as `find_shared_names` explains, that group has no
    members here: the calls under its name belong to different groups and must not be compared.
    """
    merged: dict[str, Group] = {}
    for report in reports.values():
        for name, group in report.groups.items():
            if merged.setdefault(name, group).ranks != group.ranks:
                merged[name] = replace(group, ranks=())
    return merged


def _sort_collectives(calls: Mapping[int, Sequence[Call]]) -> dict[str, dict[int, dict[int, Call]]]:
    """Return the collective calls by group, number and rank."""
    found: dict[str, dict[int, dict[int, Call]]] = {}
    for rank, issued in calls.items():
        for call in issued:
            if not sequence_of(call):
                found.setdefault(call.group, {}).setdefault(call.number, {})[rank] = call
    return found


def _compare(
    by_rank: Mapping[int, Call], calls: Mapping[int, Sequence[Call]], equal_sizes: set[str]
) -> str | None:
    """Return the code of the difference among the calls of one number, or `None`."""
    issued = list(by_rank.values())
    kinds = {OPERATIONS[c.operation] for c in issued if c.operation in OPERATIONS}
    if len(kinds) > 1:
        # Gloo implements a reduce-scatter by all-reduces, and may not record that one was requested.
        is_one = kinds == _ALIKE and len({_line(call) for call in issued}) == 1
        return None if is_one else "PL802"
    if len(kinds) != 1 or any(c.operation not in OPERATIONS for c in issued):
        return None
    kind = kinds.pop()
    if _differ(call.module or None for call in issued):
        return "PL802"
    differs = {
        "PL803": kind in equal_sizes and _differ_in_sizes(issued),
        "PL804": kind in EQUAL_DTYPES and _differ(list_dtypes(c) for c in issued),
        "PL805": kind in REDUCTIONS and _differ(c.reduce_op for c in issued),
        "PL802": kind in ROOTED and _differ(c.peer for c in issued),
    }
    code = next((code for code, is_so in differs.items() if is_so), None)
    if code in ("PL803", "PL804", "PL805") and _are_other_calls(by_rank, calls):
        return "PL802"
    return code


def find_split(by_rank: Mapping[int, Call], members: Sequence[int]) -> str:
    """Return what ranks of an all_to_all send that is not expected; empty if all is as far as is known.

    Of functional collectives, only what a rank sends and expects in all is known.
    """
    known = {rank: call.splits for rank, call in by_rank.items() if len(call.splits) == 2}
    for one, (sent, _) in known.items():
        for other, (_, expected) in known.items():
            if len(sent) == len(expected) == len(members) and {one, other} <= set(members):
                gives, takes = sent[members.index(other)], expected[members.index(one)]
                if gives != takes:
                    sends = f"rank {one} sends {gives} elements to rank {other}{_at(by_rank[one])}"
                    return f"{sends}, which expects {takes}{_at(by_rank[other])}"
    sums = [sum(sum(splits[way]) for splits in known.values()) for way in range(2)]
    is_even = sums[0] == sums[1] or known.keys() != set(members)
    return "" if is_even else f"the ranks send {sums[0]} elements in all, and expect {sums[1]}"


def _explain_split(by_rank: Mapping[int, Call], group: str, split: str) -> Verdict:
    first = next(iter(by_rank.values()))
    headline = f"different sizes in {first.operation} number {first.number} of {group}: {split}"
    places = [
        SharedPlace(
            (rank,),
            f"{_name_call(call, group)}, sends {list(call.splits[0])} elements and expects "
            f"{list(call.splits[1])}",
            _own(call),
        )
        for rank, call in by_rank.items()
        if call.splits
    ]
    return build_verdict(
        "PL803",
        headline,
        places,
        rule="What a rank expects from another one must be what that one sends to it.",
        fix="Exchange the counts first: an all_to_all_single of input_split_sizes gives output_split_sizes.",
    )


def _differ(values: Iterator[object]) -> bool:
    return len({value for value in values if value is not None}) > 1


def list_dtypes(call: Call) -> frozenset[str] | None:
    """Return the dtypes of a call; `None` if unknown or if a tensor is empty, as such are not transferred."""
    if not call.dtypes or any(math.prod(size) == 0 for size in call.sizes):
        return None
    return frozenset(_SAME_DTYPES.get(dtype, dtype) for dtype in call.dtypes)


def _differ_in_sizes(issued: Sequence[Call]) -> bool:
    """Return whether element counts differ; shapes may, and a list of tensors may meet one tensor of all."""
    if any(call.operation.endswith("_v") for call in issued):
        return False
    counts = [tuple(math.prod(size) for size in call.sizes) for call in issued if call.sizes]
    if len({len(count) for count in counts}) > 1:
        return len({sum(count) for count in counts}) > 1
    return len(set(counts)) > 1


def _are_other_calls(by_rank: Mapping[int, Call], calls: Mapping[int, Sequence[Call]]) -> bool:
    """Return whether ranks are at different lines and one has been at another's line before.

    In that case the order of calls differs, not the tensors of one call.
    """
    lines = {rank: _line(call) for rank, call in by_rank.items()}
    if None in lines.values() or len(set(lines.values())) == 1:
        return False
    buckets = {is_bucket(call.frames) for call in by_rank.values()}
    if len(buckets) > 1:
        return True
    for rank, line in lines.items():
        visited = {_line(c) for c in calls[rank] if c.group == by_rank[rank].group} - {line}
        if visited & set(lines.values()):
            return True
    return False


def _line(call: Call) -> tuple[str, int] | None:
    own = own_frames(call.frames)
    return (own[0].file, own[0].line) if own else None


def _explain(
    code: str,
    by_rank: Mapping[int, Call],
    group: str,
    source: Source,
    lines: Mapping[int, Mapping[int, tuple[str, int, str]]],
) -> Verdict:
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank, call in by_rank.items():
        key = (call.operation, call.sizes, call.dtypes, call.reduce_op, call.peer, _line(call), call.module)
        parts.setdefault(key, []).append(rank)
    # The largest set of ranks first: it mostly does what was intended.
    ordered = sorted(parts.values(), key=lambda ranks: (-len(ranks), ranks))
    firsts = [by_rank[ranks[0]] for ranks in ordered]
    what = {
        "PL802": "different collectives",
        "PL803": "different sizes",
        "PL804": "different dtypes",
        "PL805": "different reduce operations",
    }[code]
    if code == "PL802" and len({OPERATIONS.get(c.operation) for c in firsts}) == 1:
        is_root = len({_line(c) for c in firsts}) == 1 and len({c.module for c in firsts}) == 1
        what = "different roots" if is_root else "different calls"
    number = firsts[0].number
    named = [_name_part(ranks, by_rank[ranks[0]], code) for ranks in ordered[:3]]
    if len(ordered) > 3:
        rest = [rank for ranks in ordered[3:] for rank in ranks]
        named.append(f"{name_ranks(rest)} {pick(rest, 'calls', 'call')} yet another call")
    operation = "" if code == "PL802" else f"{firsts[0].operation} "
    headline = f"{what} in {operation}number {number} of {group}: {join(named)}"
    places = [
        SharedPlace(tuple(ranks), _name_call(by_rank[ranks[0]], group), _own(by_rank[ranks[0]]))
        for ranks in ordered
    ]
    sides = [
        Side(tuple(r), _own(by_rank[r[0]]), is_bucket(by_rank[r[0]].frames), lines=lines.get(r[0], {}))
        for r in ordered[:2]
    ]
    # A rank that waits in backward is less likely the one that strayed.
    here, there = sides if sides[0].is_in_backward or not sides[1].is_in_backward else sides[::-1]
    more = list_clues(here, there, source, is_apart=True)
    rule, fix = (ROOT_RULE, ROOT_FIX) if what == "different roots" else ("", "")
    return build_verdict(code, headline, places, rule=rule, fix=fix, more=more)


def _own(call: Call) -> tuple[Frame, ...]:
    return own_frames(call.frames)


def _name_part(ranks: Sequence[int], call: Call, code: str) -> str:
    """Return what ranks call, and where: `ranks 0 and 1 call all_reduce at train.py:31`."""
    verb = pick(ranks, "calls", "call")
    own = _own(call)
    where = (" in backward" if is_bucket(call.frames) else "") + (f" at {name_place(own[0])}" if own else "")
    shape = ", ".join(str(list(size)) for size in call.sizes[:3]) + (" ..." if len(call.sizes) > 3 else "")
    detail = {
        "PL803": shape or "nothing",
        "PL804": ", ".join(dict.fromkeys(call.dtypes)),
        "PL805": call.reduce_op or "no operation",
    }.get(code)
    if detail is not None:
        return f"{name_ranks(ranks)} {pick(ranks, 'gives', 'give')} {detail}{where}"
    root = f" with root {call.peer}" if call.peer is not None else ""
    module = f" of the parameters of module {call.module}" if call.module else ""
    return f"{name_ranks(ranks)} {verb} {call.operation}{module}{root}{where}"


def _name_call(call: Call, group: str) -> str:
    detail = describe_tensors(call)
    root = f" with root {call.peer}" if call.peer is not None else ""
    return f"calls {call.operation} number {call.number} of {group}{root}" + (
        f" ({detail})" if detail else ""
    )


# ---- checks for stopped jobs only, because running programs may legally do this


def find_stuck_mismatch(
    calls: Mapping[int, Sequence[Call]], groups: Mapping[str, Group], read_source: Reader | None = None
) -> Verdict | None:
    """Return a pair or a gather with differing sizes or dtypes that does not complete, else `None`.

    Tags may change the order of pairs, and NCCL gathers unequal sizes if the root expects them, so this
    applies only to jobs that have stopped.
    """
    for rank, issued in sorted(calls.items()):
        for call in issued:
            is_open = not call.done and call.operation.startswith("send") and call.peer is not None
            verdict = _compare_pair(rank, call, calls.get(call.peer or 0, ())) if is_open else None
            if verdict is not None:
                return verdict
    for name, by_number in _sort_collectives(calls).items():
        for _, by_rank in sorted(by_number.items()):
            open_ones = [c for c in by_rank.values() if not c.done and c.operation == "gather"]
            if open_ones and _differ_in_sizes(list(by_rank.values())):
                group = name_group(groups.get(name), name, len(calls))
                return _explain("PL803", by_rank, group, Source(read_source), {})
    return None


def _compare_pair(rank: int, send: Call, others: Sequence[Call]) -> Verdict | None:
    assert send.peer is not None
    for recv in others:
        is_pair = recv.operation.startswith("recv") and recv.peer == rank and recv.group == send.group
        if not is_pair or recv.done or recv.number != send.number:
            continue
        code = "PL803" if _differ_in_sizes([send, recv]) else None
        if code is None and _differ(list_dtypes(c) for c in (send, recv)):
            code = "PL804"
        if code is None:
            return None
        what = "sizes" if code == "PL803" else "dtypes"
        sides = ((rank, send, "sends"), (send.peer, recv, "receives"))
        parts = [f"rank {r} {verb} {describe_tensors(c)}{_at(c)}" for r, c, verb in sides]
        pair = f"send number {send.number} from rank {rank} to rank {send.peer}"
        headline = f"different {what} in {pair}: {join(parts)}"
        places = [SharedPlace((r,), f"{verb} {describe_tensors(c)}", _own(c)) for r, c, verb in sides]
        rule = "A receive needs the size and the dtype of its send."
        return build_verdict(code, headline, places, rule=rule)
    return None


def _at(call: Call) -> str:
    own = _own(call)
    return f" at {name_place(own[0])}" if own else ""


def find_shared_names(groups: Mapping[int, Mapping[str, Group]]) -> tuple[str, dict[int, Group]] | None:
    """Return a name by which ranks know groups with different members, with each rank's group.

    torch names groups by counting calls of new_group. If only members call it, equal counts belong to
    different groups, which then connect to each other's ranks.
    """
    by_name: dict[str, dict[int, Group]] = {}
    for rank, known in sorted(groups.items()):
        for name, group in known.items():
            by_name.setdefault(name, {})[rank] = group
    for name, by_rank in sorted(by_name.items()):
        if len({group.ranks for group in by_rank.values() if group.ranks}) > 1:
            return name, by_rank
    return None


def find_skipped_group(
    reports: Mapping[int, Report], building: Sequence[int]
) -> tuple[Group, list[int], list[int]] | None:
    """Return a group whose `new_group` some ranks have never called, its makers, and those ranks.

    torch names a group by counting on each rank. Take a rank that makes a group now, under a name that others
    gave to a group without it: it has not called the `new_group` of theirs.

    Args:
        reports: by rank.
        building: ranks that make a group now.
    """
    counts = {r: reports[r].num_named for r in building if r in reports and reports[r].num_named > 0}
    if not counts:
        return None
    least = min(counts.values())
    name = str(least - 1)  # The name of the group that they make now.
    behind = [r for r, count in sorted(counts.items()) if count == least and name not in reports[r].groups]
    known = {rank: report.groups[name] for rank, report in sorted(reports.items()) if name in report.groups}
    makers = [rank for rank in known if counts.get(rank, least + 1) > least]
    if not makers or not behind:
        return None
    group = known[makers[0]]
    return None if set(group.ranks) & set(behind) else (group, makers, behind)


def find_partial_group(groups: Mapping[int, Mapping[str, Group]]) -> tuple[str, list[int]] | None:
    """Return the latest group that only some ranks know, with these ranks; `None` if all know the same."""
    names = sorted({name for known in groups.values() for name in known}, key=lambda name: (len(name), name))
    for name in reversed(names):
        members = sorted(rank for rank, known in groups.items() if name in known)
        if len(members) < len(groups):
            return name, members
    return None
