"""Builds the trace of a rank from the events of its file: steps, phases, computation and collectives.

On CUDA, computation is kernels other than NCCL's. On CPU, it is the loop's time in forward, backward and
optimizer in which it does not wait for a collective. Files that Paceline recorded have these spans, and the
group and number of each collective. In other files they follow from the order of events, as far as it shows.
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
from paceline.profiling.intervals import NOTHING, Spans, as_spans, subtract, unite
from paceline.profiling.kineto import EventKind, Recorded, TraceFile, decode_arguments
from paceline.profiling.light import divide_loop
from paceline.profiling.rank.loop_phases import WAITING
from paceline.profiling.rank_trace import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    READING,
    TRANSFERS,
    UNSCHEDULED,
    CodePlace,
    DeviceTrace,
    RankTrace,
    TracedCollective,
    TracedStep,
)
from paceline.torch_seams.flight import name_operation

_UNMATCHED = "unmatched"
_LATE_NS = 100_000
# The class of torch's iterators of loaders with num_workers=0, in the names of their annotations.
_INLINE = "_SingleProcess"

_REPLAYED = (
    "CUDA graphs were replayed: their kernels count as computation, but belong to no operator. Forward and "
    "backward within a graph are not known, and collectives in it may lack their group."
)


def build_rank_trace(file: TraceFile, rank: int) -> RankTrace:
    """Return the trace of a rank.

    Args:
        rank: whose it is.

    Raises:
        OverflowError: if a number that the recorder wrote has more than 64 bits.
    """
    spans = np.stack((file.begins_ns, file.ends_ns), axis=1)
    has_kernels = bool((file.kinds == EventKind.KERNEL).any())
    steps = _find_steps(file, spans)
    recorded = file.recorded
    collectives, remarks = _list_kernels(file, rank) if has_kernels else _list_spans(file, rank, steps)
    if recorded is not None:  # Raises OverflowError: numbers in JSON have any length.
        as_spans((begin, end) for _, begin, end in recorded.steps)
        as_spans((issued, number) for issued, _, number, _, _ in recorded.calls)
    if recorded is not None and recorded.partial:
        remarks = [*remarks, recorded.partial]
    if file.has_replays:
        remarks = [*remarks, _REPLAYED]
    if recorded is None and steps and steps[0].number == 1:
        remarks = [
            *remarks,
            "Steps are numbered within the traces: the files do not contain the run's step numbers.",
        ]
    main = np.isin(file.threads, _find_main_threads(file))
    tops = _find_tops(file, main)
    kinds = file.kinds[tops]
    data, optimizer = (
        unite(spans[main & (file.kinds == kind)]) for kind in (EventKind.DATA, EventKind.OPTIMIZER)
    )
    given = None if recorded is None else recorded.loop
    loop = {name: as_spans(pairs) for name, pairs in (given or {}).items()}
    if not loop:
        entries = np.concatenate(
            (file.begins_ns[main & (file.kinds == EventKind.ENTRY)], spans[tops[kinds == EventKind.LAYER], 0])
        )
        loop = _divide_runs(spans[tops], kinds, np.sort(entries))
        loop[BACKWARD] = _extend(loop[BACKWARD], spans[tops], collectives)
    phases, busy = divide_loop(loop, data, optimizer)
    device: DeviceTrace | None = None
    if has_kernels:
        phases[READING] = unite(_join_runs(spans[tops], kinds == EventKind.ITEM))
        busy = unite(spans[file.kinds == EventKind.KERNEL])
        device = DeviceTrace(
            unite(spans[file.kinds == EventKind.COPY]),
            unite(spans[file.kinds == EventKind.SYNC]),
            np.sort(file.begins_ns[file.kinds == EventKind.KERNEL]),
        )
    elif WAITING not in loop:
        works = main & np.isin(file.kinds, (EventKind.OPERATOR, EventKind.LAYER, EventKind.ITEM))
        loop[WAITING] = _find_waits(subtract(busy, unite(spans[works])), collectives)
        busy = subtract(busy, loop[WAITING])
    return RankTrace(
        rank=rank,
        world_size=file.world_size,
        steps=steps,
        phases=phases,
        compute=busy,
        collectives=collectives,
        host=file.host,
        slowdown=None if recorded is None else recorded.slowdown,
        remarks=tuple(remarks),
        samples=NOTHING if recorded is None else _list_samples(recorded),
        collections=UNSCHEDULED if recorded is None else _list_collections(recorded),
        places=() if recorded is None else tuple(CodePlace(*place) for place in recorded.places),
        members={} if recorded is None else {k: tuple(v) for k, v in recorded.members.items()},
        scheduling=UNSCHEDULED if recorded is None else _list_scheduling(recorded),
        reducers=() if recorded is None else tuple(recorded.reducers),
        device=device,
        is_loader_inline=any(_INLINE in file.names[i] for i in np.flatnonzero(file.kinds == EventKind.DATA)),
    )


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
    fields["samples"] = trace.samples + np.array([by_ns, 0])
    fields["collections"] = trace.collections + np.array([by_ns, by_ns, 0])
    fields["scheduling"] = trace.scheduling + np.array([by_ns, 0, 0])
    fields["device"] = None if trace.device is None else trace.device.move(by_ns)
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


def _find_tops(file: TraceFile, main: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the events on the loop's threads that are in no other one, by time."""
    kinds = EventKind.CALL, EventKind.COLLECTIVE, EventKind.KERNEL, EventKind.STEP, EventKind.ENTRY
    chosen = np.flatnonzero(main & ~np.isin(file.kinds, kinds))
    found = []
    for thread in np.unique(file.threads[chosen]):
        own = chosen[file.threads[chosen] == thread]
        own = own[np.lexsort((-file.ends_ns[own], file.begins_ns[own]))]
        reach = np.maximum.accumulate(file.ends_ns[own])
        found.append(own[np.concatenate(([True], file.begins_ns[own][1:] >= reach[:-1]))])
    tops = np.concatenate(found) if found else chosen
    return tops[np.argsort(file.begins_ns[tops], kind="stable")]


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
    ends_ns = np.array([spans[i, 1] for i in updates if file.names[i] == first])
    # Two optimizers of one class look alike, but share the batches, which are loaded once for both.
    loads = np.searchsorted(ends_ns, spans[file.kinds == EventKind.DATA, 0])
    lasts = np.unique(np.append(loads[loads > 0], len(ends_ns)))
    apart = np.diff(lasts)
    if len(apart) > 1 and apart[0] > 1 and (apart[:-1] == apart[0]).all() and apart[-1] <= apart[0]:
        ends_ns = ends_ns[lasts[: None if apart[-1] == apart[0] else -1] - 1]
    edges = [int(spans[:, 0].min()), *ends_ns.tolist()]
    return tuple(TracedStep(n, *pair) for n, pair in enumerate(itertools.pairwise(edges), 1))


# ---- phases


def _find_main_threads(file: TraceFile) -> list[int]:
    """Return the thread of the training loop, and those that run backwards."""
    loop = np.isin(file.kinds, (EventKind.OPTIMIZER, EventKind.DATA, EventKind.STEP))
    if not loop.any():
        loop = file.kinds == EventKind.OPERATOR
    main = Counter(file.threads[loop].tolist()).most_common(1)
    backward = set(file.threads[file.kinds == EventKind.WRAPPER].tolist())
    return [*backward, *(thread for thread, _ in main)]


_LOOP = {
    EventKind.WRAPPER: BACKWARD,
    EventKind.ENDING: BACKWARD,
    EventKind.OPTIMIZER: OPTIMIZER,
    EventKind.DATA: DATA,
}


def _divide_runs(tops: Spans, kinds: NDArray[np.int8], entries: NDArray[np.int64]) -> dict[str, Spans]:
    """Return the spans of forward and backward by the order of what the training loop does.

    Operators before a backward are forward and loss, from the first layer on. Others are a forward only with
    a layer, as in an evaluation. What follows a backward up to its ending belongs to it.

    Args:
        tops: of the loop's events, by time.
        kinds: theirs.
        entries: the begins of layers, and of modules that DDP and FSDP wrap.
    """
    found: dict[str, list[tuple[int, int]]] = {FORWARD: [], BACKWARD: []}
    names = [_LOOP.get(EventKind(kind), FORWARD) for kind in kinds.tolist()]
    firsts = [place for place, name in enumerate(names) if names[place - 1 : place] != [name]]
    order = ["", *(names[first] for first in firsts), ""]
    for place, (first, last) in enumerate(itertools.pairwise([*firsts, len(names)])):
        begin, end = int(tops[first, 0]), int(tops[first:last, 1].max())
        before, phase, after = order[place : place + 3]
        if phase == BACKWARD:
            found[BACKWARD].append((begin, end))
        elif before == after == BACKWARD and kinds[last] == EventKind.ENDING:
            found[BACKWARD].append((int(tops[first - 1, 0]), int(tops[last, 1])))
        elif phase == FORWARD:
            since = int(tops[first - 1, 1]) if first else begin
            own = entries[(since <= entries) & (entries < end)]
            if len(own) or after == BACKWARD:
                found[FORWARD].append((int(own[0]) if len(own) else begin, end))
    return {phase: unite(as_spans(pairs)) for phase, pairs in found.items()}


def _join_runs(spans: Spans, is_in: NDArray[np.bool_]) -> Spans:
    """Return one span for each run of chosen ones without another between them."""
    if not is_in.any():
        return NOTHING
    is_new = np.concatenate(([True], is_in[1:] != is_in[:-1]))
    runs = [(first, last) for first, last in _runs(is_new) if is_in[first]]
    return as_spans((int(spans[a, 0]), int(spans[a:b, 1].max())) for a, b in runs)


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


def _find_waits(gaps: Spans, collectives: Sequence[TracedCollective]) -> Spans:
    """Return the part of gaps between operators in which the loop waited: until a collective ended there.

    gloo's thread wakes the loop before it notes its own end.
    """
    by_end = sorted(collectives, key=lambda part: part.end_ns)
    ends = [part.end_ns for part in by_end]
    found = []
    for begin, end in gaps.tolist():
        last = end + _LATE_NS + (end - begin) // 10
        ended = by_end[bisect_right(ends, begin) : bisect_right(ends, last)]
        if ended:
            issued = min(part.issued_ns for part in ended)
            found.append((max(begin, issued), min(end, ended[-1].end_ns)))
    return unite(as_spans(found))


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
            operation, group, sequence = _name_kernel(file.names[i]), "", _name_unmatched(rank)
            remarks.append("NCCL's kernels of this torch do not name their group: ranks are not compared.")
        elif operation.lower() in TRANSFERS:
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


def _name_kernel(name: str) -> str:
    """Return the operation of a kernel of NCCL: `ncclDevKernel_SendRecv(...)` is a `send/recv`."""
    found = re.match(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)", name, re.IGNORECASE)
    operation = found[1].lower() if found else name.partition("(")[0]
    return {"sendrecv": "send/recv", "reducescatter": "reduce_scatter"}.get(operation, operation)


def _list_spans(
    file: TraceFile, rank: int, steps: Sequence[TracedStep]
) -> tuple[tuple[TracedCollective, ...], list[str]]:
    """Return gloo's spans, which have no group, with the calls that issued them as far as both agree."""
    indices = np.flatnonzero(file.kinds == EventKind.COLLECTIVE)
    indices = indices[np.argsort(file.begins_ns[indices], kind="stable")].tolist()
    is_transfer = [file.names[i].rpartition(":")[2] in TRANSFERS for i in indices]
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
    # Sends and receives of two ranks are matched with nobody's, as on CUDA.
    known += [
        TracedCollective(
            _name(file.names[i]),
            "",
            _name_unmatched(rank),
            -1 - i,
            int(file.begins_ns[i]),
            int(file.ends_ns[i]),
            _measure_input(file, i),
        )
        for i in transfers
    ]
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


def _find_step(steps: Sequence[TracedStep], instant_ns: int) -> int:
    """Return the number of the step that contains an instant, or of the step before it."""
    place = bisect_right(steps, instant_ns, key=lambda step: step.begin_ns)
    return steps[place - 1].number if place else 0


def _is_transfer(name: str) -> bool:
    return name.startswith(("c10d::send", "c10d::recv"))


def _measure_input(file: TraceFile, index: int) -> int | None:
    """Return the bytes of a span's first input, if shapes were recorded."""
    arguments = decode_arguments(file.arguments[index])
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not (isinstance(dims, list) and dims and isinstance(types, list) and types):
        return None
    return count_bytes(dims[0], types[0]) if isinstance(dims[0], list) else None


def _name(recorded: str) -> str:
    """Return an operation's name as users call it."""
    return name_operation(recorded.rpartition(":")[2])
