"""Builds the trace of a rank from the events of its file: steps, phases, computation and collectives.

On CPU, computation is what operators do that call no other operator. On CUDA it is kernels other than NCCL's.
Files that Paceline recorded have marks for forward, backward and garbage collection, and the group and number
of each collective. In other files these follow from the order of events, as far as they can be known.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.profiling.elements import count_bytes
from paceline.profiling.intervals import NOTHING, Spans, as_spans, unite
from paceline.profiling.kineto import EventKind, Recorded, TraceFile, decode_arguments
from paceline.profiling.light import divide_loop
from paceline.profiling.rank.marks import MARK, SEARCHING, WAITING
from paceline.profiling.trace import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
    READING,
    UNSCHEDULED,
    CodePlace,
    RankTrace,
    TracedCollective,
    TracedStep,
)

_OPERATIONS = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
_TRANSFERS = ("send", "recv")
_UNMATCHED = "unmatched"
# The class of torch's iterators of loaders with num_workers=0, in the names of their annotations.
_INLINE = "_SingleProcess"

_REPLAYED = (
    "CUDA graphs were replayed: their kernels count as computation, but belong to no operator. Forward and "
    "backward within a graph are not known, and collectives in it may lack their group."
)


def build_rank_trace(file: TraceFile, rank: int) -> RankTrace:
    """Return the trace of a rank.

    Args:
        file: its events.
        rank: whose it is.

    Raises:
        OverflowError: if a number that the recorder wrote has more than 64 bits.
    """
    spans = np.stack((file.begins_ns, file.ends_ns), axis=1)
    order = np.lexsort((-file.ends_ns, file.begins_ns, file.threads))
    is_top, is_leaf = _find_nesting(file, order)
    has_kernels = bool((file.kinds == EventKind.KERNEL).any())
    steps = _find_steps(file, spans)
    recorded = file.recorded
    loop = recorded.loop if recorded is not None else None
    if has_kernels:
        computes = file.kinds == EventKind.KERNEL
        collectives, remarks = _list_kernels(file, rank)
    else:
        computes = is_leaf & np.isin(file.kinds, (EventKind.OPERATOR, EventKind.ITEM))
        collectives, remarks = _list_spans(file, rank, steps)
    if recorded is not None:  # Raises OverflowError: numbers in JSON have any length.
        as_spans((begin, end) for _, begin, end in recorded.steps)
        as_spans((issued, number) for issued, _, number, _, _ in recorded.calls)
        as_spans([(recorded.clock_ahead_ns, recorded.clock_error_ns)])
    if recorded is not None and recorded.partial:
        remarks = [*remarks, recorded.partial]
    if file.has_replays:
        remarks = [*remarks, _REPLAYED]
    if recorded is None and steps and steps[0].number == 1:
        remarks = [
            *remarks,
            "Steps are numbered within the traces: the files do not contain the run's step numbers.",
        ]
    ahead = 0 if recorded is None else recorded.clock_ahead_ns
    compute = unite(spans[computes])
    if loop is None:
        phases = _find_phases(file, spans, order[is_top[order]], collectives)
    else:
        phases, busy = divide_loop(loop, *_list_annotations(file, spans, order[is_top[order]]))
        compute = compute if has_kernels else busy
    trace = RankTrace(
        rank=rank,
        world_size=file.world_size,
        steps=steps,
        phases=phases,
        compute=compute,
        collectives=collectives,
        host=file.host,
        clock_error_ns=0 if recorded is None else recorded.clock_error_ns,
        slowdown=None if recorded is None else recorded.slowdown,
        remarks=tuple(remarks),
        samples=NOTHING if recorded is None else _list_samples(recorded),
        collections=UNSCHEDULED if recorded is None else _list_collections(recorded),
        places=() if recorded is None else tuple(CodePlace(*place) for place in recorded.places),
        is_light=loop is not None,
        members={} if recorded is None else {k: tuple(v) for k, v in recorded.members.items()},
        scheduling=UNSCHEDULED if recorded is None else _list_scheduling(recorded),
        is_loader_inline=any(_INLINE in file.names[i] for i in np.flatnonzero(file.kinds == EventKind.DATA)),
    )
    if loop is not None and recorded is not None:
        trace = replace(
            trace,
            blocked=unite(as_spans(loop.get(WAITING, ()))),
            searches=unite(as_spans(loop.get(SEARCHING, ()))),
            reducers=tuple(recorded.reducers),
            cpu_ns=recorded.cpu_ns,
            cores=recorded.cores,
        )
    return move_trace(trace, -ahead)


def move_trace(trace: RankTrace, by_ns: int) -> RankTrace:
    """Return a trace with all times moved."""
    if not by_ns:
        return trace
    fields: dict[str, Any] = dict(vars(trace))
    fields["steps"] = tuple(TracedStep(s.number, s.begin_ns + by_ns, s.end_ns + by_ns) for s in trace.steps)
    fields["phases"] = {name: spans + by_ns for name, spans in trace.phases.items()}
    fields["compute"] = trace.compute + by_ns
    fields["collectives"] = tuple(
        replace(part, issued_ns=part.issued_ns + by_ns, end_ns=part.end_ns + by_ns)
        for part in trace.collectives
    )
    fields["blocked"], fields["searches"] = trace.blocked + by_ns, trace.searches + by_ns
    fields["samples"] = trace.samples + np.array([by_ns, 0])
    fields["collections"] = trace.collections + np.array([by_ns, by_ns, 0])
    fields["scheduling"] = trace.scheduling + np.array([by_ns, 0, 0])
    return RankTrace(**fields)


def _list_samples(recorded: Recorded) -> Spans:
    """Return the samples whose place exists."""
    samples = as_spans(recorded.samples)
    return samples[(samples[:, 1] >= 0) & (samples[:, 1] < len(recorded.places))]


def _list_collections(recorded: Recorded) -> NDArray[np.int64]:
    """Return the collections whose place exists."""
    rows = np.array(recorded.collections, dtype=np.int64).reshape(-1, 3)
    return rows[(rows[:, 2] >= 0) & (rows[:, 2] < len(recorded.places))]


def _list_scheduling(recorded: Recorded) -> NDArray[np.int64]:
    rows = np.array(recorded.scheduling, dtype=np.int64).reshape(-1, 3)
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _list_annotations(file: TraceFile, spans: Spans, tops: NDArray[np.intp]) -> tuple[Spans, Spans]:
    """Return the spans of loaders and of optimizers on the thread of the training loop."""
    tops = tops[np.isin(file.threads[tops], _find_main_threads(file))]
    kinds = file.kinds[tops]
    return unite(spans[tops[kinds == EventKind.DATA]]), unite(spans[tops[kinds == EventKind.OPTIMIZER]])


def _find_nesting(file: TraceFile, order: NDArray[np.intp]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the host's events that are in no other event of their thread, and those that contain none."""
    is_top, is_leaf = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    # Marks and steps contain the others; gloo's spans belong to no thread's calls.
    nests = ~np.isin(file.kinds, (EventKind.COLLECTIVE, EventKind.KERNEL, EventKind.STEP, EventKind.MARKED))
    chosen = order[nests[order]]
    if not len(chosen):
        return is_top, is_leaf
    begins, ends, threads = file.begins_ns[chosen], file.ends_ns[chosen], file.threads[chosen]
    is_new = np.concatenate(([True], threads[1:] != threads[:-1]))
    is_leaf[chosen] = np.concatenate((is_new[1:] | (begins[1:] >= ends[:-1]), [True]))
    for first, last in _runs(is_new):
        reach = np.maximum.accumulate(ends[first:last])
        is_top[chosen[first:last]] = np.concatenate(([True], begins[first + 1 : last] >= reach[:-1]))
    return is_top, is_leaf


def _runs(is_first: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Return begin and end of each run of entries, where it is known which begin one."""
    firsts = [*np.flatnonzero(is_first).tolist(), len(is_first)]
    yield from itertools.pairwise(firsts)


def _find_steps(file: TraceFile, spans: Spans) -> tuple[TracedStep, ...]:
    if file.recorded is not None:
        return tuple(TracedStep(*step) for step in file.recorded.steps if step[2] > step[1])
    marks = np.flatnonzero(file.kinds == EventKind.STEP)
    if len(marks):
        numbers = {int(spans[i, 0]): file.names[i].rpartition("#")[2] for i in marks}
        ends = {int(spans[i, 0]): int(spans[i, 1]) for i in marks}
        return tuple(
            TracedStep(int(number), begin, ends[begin])
            for begin, number in sorted(numbers.items())
            if number.isdigit() and len(number) < 10 and ends[begin] > begin
        )
    updates = [i for i in np.flatnonzero(file.kinds == EventKind.OPTIMIZER) if ".step#" in file.names[i]]
    if not updates:
        return ()
    updates.sort(key=lambda i: int(spans[i, 1]))
    first = file.names[updates[0]]  # a job of several optimizers ends a step with the first one's
    ends_ns = [int(spans[i, 1]) for i in updates if file.names[i] == first]
    edges = [int(spans[:, 0].min()), *ends_ns]
    return tuple(TracedStep(n, *pair) for n, pair in enumerate(itertools.pairwise(edges), 1))


# ---- phases


def _find_phases(
    file: TraceFile, spans: Spans, tops: NDArray[np.intp], collectives: Sequence[TracedCollective]
) -> dict[str, Spans]:
    """Return the spans of each phase.

    Args:
        file: all events.
        spans: theirs.
        tops: events of the host that are in no other one, by thread and time.
        collectives: of the rank.
    """
    found: dict[str, list[Spans]] = defaultdict(list)
    marked = np.flatnonzero(file.kinds == EventKind.MARKED)
    for name in {file.names[i] for i in marked}:
        phase = name.removeprefix(MARK)
        if phase in PHASES:
            found[phase].append(spans[[i for i in marked if file.names[i] == name]])
    tops = tops[np.isin(file.threads[tops], _find_main_threads(file))]
    tops = tops[np.argsort(file.begins_ns[tops], kind="stable")]
    kinds = file.kinds[tops]
    found[DATA].append(spans[tops[kinds == EventKind.DATA]])
    found[OPTIMIZER].append(spans[tops[kinds == EventKind.OPTIMIZER]])
    found[READING].append(_join_runs(spans[tops], kinds == EventKind.ITEM))
    # Calls that issue collectives belong to whatever is around them.
    tops = tops[kinds != EventKind.CALL]
    for phase, hulls in _divide_runs(spans[tops], file.kinds[tops]).items():
        if phase == BACKWARD and not len(marked):
            found[BACKWARD].append(_extend(hulls, spans[tops], collectives))
        elif phase == FORWARD and len(marked):
            found[FORWARD].append(_extend_forward(unite(*found[FORWARD]), hulls))
        elif phase != BACKWARD:
            found[phase].append(hulls)
    return {name: unite(*parts) for name, parts in found.items()}


def _find_main_threads(file: TraceFile) -> list[int]:
    """Return the thread of the training loop, and those that run backwards."""
    loop = np.isin(file.kinds, (EventKind.OPTIMIZER, EventKind.DATA, EventKind.STEP))
    if not loop.any():
        loop = file.kinds == EventKind.OPERATOR
    main = Counter(file.threads[loop].tolist()).most_common(1)
    backward = set(file.threads[file.kinds == EventKind.WRAPPER].tolist())
    return [*backward, *(thread for thread, _ in main)]


_LOOP = {
    EventKind.OPERATOR: FORWARD,
    EventKind.ANNOTATION: FORWARD,
    EventKind.ITEM: FORWARD,
    EventKind.WRAPPER: BACKWARD,
    EventKind.OPTIMIZER: OPTIMIZER,
    EventKind.DATA: DATA,
}


def _divide_runs(tops: Spans, kinds: NDArray[np.int8]) -> dict[str, Spans]:
    """Return the spans of forward, backward and optimizer by the order of what the training loop does.

    Operators before a backward are forward and loss. Those between a backward and the optimizer, such as
    clipping, belong to the optimizer.
    """
    if not len(tops):
        return {}
    names = [FORWARD, BACKWARD, OPTIMIZER, DATA]
    numbers = np.zeros(max(EventKind) + 1, dtype=np.int8)
    for kind, name in _LOOP.items():
        numbers[kind] = names.index(name)
    phases = numbers[kinds]
    runs = list(_runs(np.concatenate(([True], phases[1:] != phases[:-1]))))
    order = [names[phases[first]] for first, _ in runs]
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, (first, last) in enumerate(runs):
        phase = order[place]
        if phase == FORWARD and order[place - 1 : place] == [BACKWARD]:
            phase = OPTIMIZER if order[place + 1 : place + 2] == [OPTIMIZER] else FORWARD
        if phase != DATA:
            found[phase].append((int(tops[first, 0]), int(tops[first:last, 1].max())))
    return {phase: as_spans(pairs) for phase, pairs in found.items()}


def _join_runs(spans: Spans, is_in: NDArray[np.bool_]) -> Spans:
    """Return one span for each run of chosen ones without another between them."""
    if not is_in.any():
        return NOTHING
    is_new = np.concatenate(([True], is_in[1:] != is_in[:-1]))
    runs = [(first, last) for first, last in _runs(is_new) if is_in[first]]
    return as_spans((int(spans[a, 0]), int(spans[a:b, 1].max())) for a, b in runs)


def _extend_forward(marked: Spans, hulls: Spans) -> Spans:
    """Return forwards up to the last operator that follows without a break: the loss."""
    return as_spans(
        (begin, max(end, *(int(last) for first, last in hulls.tolist() if first < end and begin < last), end))
        for begin, end in marked.tolist()
    )


def _extend(backward: Spans, tops: Spans, collectives: Sequence[TracedCollective]) -> Spans:
    """Return backwards up to the end of the collectives that they issued, or to what follows on the host.

    A backward of DDP waits for its buckets after its last operator.
    """
    extended = []
    by_issue = sorted(collectives, key=lambda part: part.issued_ns)
    issues = [part.issued_ns for part in by_issue]
    for begin, end in backward.tolist():
        own = [part.end_ns for part in by_issue[bisect_left(issues, begin) : bisect_right(issues, end)]]
        place = int(np.searchsorted(tops[:, 0], end))
        following = int(tops[place, 0]) if place < len(tops) else end
        extended.append((begin, max(end, min(max(own, default=end), following))))
    return as_spans(extended)


# ---- collectives


def _list_kernels(file: TraceFile, rank: int) -> tuple[tuple[TracedCollective, ...], list[str]]:
    """Return NCCL's kernels; older versions of torch do not record what they are."""
    found, remarks, counts = [], [], Counter[tuple[str, str]]()
    indices = np.flatnonzero(file.kinds == EventKind.COLLECTIVE)
    for i in indices[np.argsort(file.begins_ns[indices], kind="stable")].tolist():
        arguments = decode_arguments(file.arguments[i])
        operation, group = arguments.get("Collective name"), arguments.get("Process Group Name")
        sequence = ""
        if not isinstance(operation, str) or not isinstance(group, str):
            operation, group, sequence = file.names[i].partition("(")[0], "", _name_unmatched(rank)
            remarks.append("NCCL's kernels of this torch do not name their group: ranks are not compared.")
        elif operation.lower() in _TRANSFERS:
            sequence = _name_unmatched(rank)
        # Only a number on one rank: that rank's transfers are matched with nobody's.
        counts[group, sequence] += 1
        number = counts[group, sequence] if not sequence else -1 - i
        num_bytes = count_bytes([arguments.get("In msg nelems")], arguments.get("dtype"))
        ends = int(file.ends_ns[i])
        found.append(
            TracedCollective(
                _name(operation), group, sequence, number, int(file.begins_ns[i]), ends, num_bytes
            )
        )
    return tuple(found), list(dict.fromkeys(remarks))


def _list_spans(
    file: TraceFile, rank: int, steps: Sequence[TracedStep]
) -> tuple[tuple[TracedCollective, ...], list[str]]:
    """Return gloo's spans, which have no group, with the calls that issued them as far as both agree."""
    indices = np.flatnonzero(file.kinds == EventKind.COLLECTIVE)
    indices = indices[np.argsort(file.begins_ns[indices], kind="stable")].tolist()
    is_transfer = [file.names[i].rpartition(":")[2] in _TRANSFERS for i in indices]
    transfers = [i for i, moves in zip(indices, is_transfer, strict=True) if moves]
    others = [i for i, moves in zip(indices, is_transfer, strict=True) if not moves]
    known, remarks = _join_calls(file, others), []
    if known is None:
        if file.recorded is not None:
            remarks.append("Some collectives are not in torch's Flight Recorder: they are matched in order.")
        known = _number_in_steps(file, others, steps)
        if len(set(file.groups)) > 1:
            remarks.append("gloo's spans have no group: with several groups, ranks are not compared.")
            known = [TracedCollective(*_unmatched(p, rank, i), p.num_bytes) for i, p in enumerate(known)]
    known += _list_transfers(file, rank, transfers, steps)
    known.sort(key=lambda part: part.issued_ns)
    return tuple(_separate_remade(known)), remarks


def _separate_remade(parts: Sequence[TracedCollective]) -> Iterator[TracedCollective]:
    """Yield the parts with another group's name for those of a group that was made again.

    A group that is destroyed and made again has the same name, and counts its collectives from 1 again.

    Args:
        parts: in order of issue.
    """
    seen: dict[str, set[int]] = defaultdict(set)
    again = Counter[str]()
    for part in parts:
        if not part.sequence:
            if part.number in seen[part.group]:
                again[part.group] += 1
                seen[part.group].clear()
            seen[part.group].add(part.number)
            if again[part.group]:
                part = replace(part, group=f"{part.group}, made again ({again[part.group]})")
        yield part


def _name_unmatched(rank: int) -> str:
    """Return a sequence that no other rank has: equal ones would be matched."""
    return f"{_UNMATCHED} on rank {rank}"


def _unmatched(part: TracedCollective, rank: int, index: int) -> tuple[str, str, str, int, int, int]:
    return part.operation, part.group, _name_unmatched(rank), index, part.issued_ns, part.end_ns


def _join_calls(file: TraceFile, indices: Sequence[int]) -> list[TracedCollective] | None:
    """Return the spans with what the recorder knows of their calls, if both lists are the same calls.

    Spans of one operation and size begin in order of issue. Others may not on a busy machine: gloo's threads
    take the calls in order, and note the begin of a span later.
    """
    recorded = file.recorded
    if recorded is None or len(recorded.calls) != len(indices):
        return None
    lines = _name_lines(recorded)
    joined = []
    for spans, calls in _pair_kinds(file, indices, recorded):
        if len(spans) != len(calls):
            return None
        for i, place in zip(spans, calls, strict=True):
            issued, group, number, operation, size = recorded.calls[place]
            end, name = int(file.ends_ns[i]), _name(operation)
            joined.append(
                TracedCollective(name, group, "", number, min(issued, end), end, size, lines[place])
            )
    return joined


def _pair_kinds(
    file: TraceFile, indices: Sequence[int], recorded: Recorded
) -> Iterator[tuple[list[int], list[int]]]:
    """Return the spans and the places of the calls of each operation, and of each size if both have it."""
    spans: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
    calls: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
    for i in indices:
        spans[_name(file.names[i])].append((i, _measure_input(file, i)))
    for place, (_, _, _, operation, size) in enumerate(recorded.calls):
        calls[_name(operation)].append((place, size))
    for name in spans.keys() | calls.keys():
        own, others = spans[name], calls[name]
        sizes = Counter(each for _, each in own)
        if sizes != Counter(each for _, each in others):
            yield [i for i, _ in own], [place for place, _ in others]
            continue
        for known in sizes:
            yield [i for i, each in own if each == known], [place for place, each in others if each == known]


def _name_lines(recorded: Recorded) -> list[str]:
    """Return the user's line of each recorded call; empty where it is unknown."""
    known = [str(CodePlace(*place)) for place in recorded.places]
    numbers = [*recorded.call_places, *[-1] * len(recorded.calls)][: len(recorded.calls)]
    return [known[number] if 0 <= number < len(known) else "" for number in numbers]


def _number_in_steps(
    file: TraceFile, indices: Sequence[int], steps: Sequence[TracedStep]
) -> list[TracedCollective]:
    """Return the spans numbered by step and order, issued when the calls began, if there is one per span."""
    calls = [
        i for i in np.flatnonzero(file.kinds == EventKind.CALL).tolist() if not _is_transfer(file.names[i])
    ]
    calls.sort(key=lambda i: int(file.begins_ns[i]))
    issues = calls if len(calls) == len(indices) else indices
    found, counts = [], Counter[int]()
    for i, issue in zip(indices, issues, strict=True):
        end = int(file.ends_ns[i])
        issued = min(int(file.begins_ns[issue]), end)
        step = _find_step(steps, issued)
        counts[step] += 1
        number = step * 1_000_000 + counts[step]
        size = _measure_input(file, i)
        found.append(TracedCollective(_name(file.names[i]), "", "", number, issued, end, size))
    return found


def _list_transfers(
    file: TraceFile, rank: int, indices: Sequence[int], steps: Sequence[TracedStep]
) -> list[TracedCollective]:
    """Return sends and receives; those with an unknown peer are not matched."""
    known = _find_peers(file, rank, indices)
    found, counts = [], Counter[tuple[str, str, int]]()
    for place, i in enumerate(indices):
        operation, begin, end = _name(file.names[i]), int(file.begins_ns[i]), int(file.ends_ns[i])
        group, sequence, size = known[place] or (
            "",
            f"{_name_unmatched(rank)}, {place}",
            _measure_input(file, i),
        )
        step = _find_step(steps, begin)
        counts[group, sequence, step] += 1
        number = step * 1_000_000 + counts[group, sequence, step]
        found.append(TracedCollective(operation, group, sequence, number, begin, end, size))
    return found


def _find_peers(
    file: TraceFile, rank: int, indices: Sequence[int]
) -> list[tuple[str, str, int | None] | None]:
    """Return group, direction and bytes of each transfer, `None` where the peer is unknown."""
    recorded = [] if file.recorded is None else file.recorded.transfers
    names = [_name(file.names[i]) for i in indices]
    if recorded and [operation for _, _, _, operation, _ in recorded] == names:
        return [(group, direction, size) for _, group, direction, _, size in recorded]
    calls = [i for i in np.flatnonzero(file.kinds == EventKind.CALL).tolist() if _is_transfer(file.names[i])]
    calls.sort(key=lambda i: int(file.begins_ns[i]))
    whole = tuple(range(file.world_size))
    # A peer is a number within a group, which the call does not name.
    is_one_group = all(ranks in (whole, (rank,)) for ranks in file.groups) and bool(file.groups)
    found: list[tuple[str, str, int | None] | None] = []
    for place, (i, name) in enumerate(zip(indices, names, strict=True)):
        peer = 1 - rank if file.world_size == 2 else None
        if peer is None and is_one_group and len(calls) == len(indices):
            peer = _find_peer(file, calls[place])
        direction = f"{rank}>{peer}" if name == "send" else f"{peer}>{rank}"
        found.append(None if peer is None else ("", direction, _measure_input(file, i)))
    return found


def _find_step(steps: Sequence[TracedStep], instant_ns: int) -> int:
    """Return the number of the step that contains an instant, or of the step before it."""
    place = bisect_right(steps, instant_ns, key=lambda step: step.begin_ns)
    return steps[place - 1].number if place else 0


def _is_transfer(name: str) -> bool:
    return name.startswith(("c10d::send", "c10d::recv"))


def _find_peer(file: TraceFile, index: int) -> int | None:
    """Return the peer of a call of send or receive: its third argument, if shapes were recorded."""
    inputs = decode_arguments(file.arguments[index]).get("Concrete Inputs")
    if isinstance(inputs, list) and len(inputs) > 2 and re.fullmatch(r"\d{1,6}", str(inputs[2])):
        return int(inputs[2])
    return None


def _measure_input(file: TraceFile, index: int) -> int | None:
    """Return the bytes of a span's first input, if shapes were recorded."""
    arguments = decode_arguments(file.arguments[index])
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not (isinstance(dims, list) and dims and isinstance(types, list) and types):
        return None
    return count_bytes(dims[0], types[0]) if isinstance(dims[0], list) else None


def _name(recorded: str) -> str:
    """Return an operation's name as users call it: without backend, underscore and suffixes."""
    name = recorded.rpartition(":")[2].lower().removeprefix("_")
    for suffix in ("_base", "_coalesced"):
        name = name.removesuffix(suffix)
    return _OPERATIONS.get(name, name)
