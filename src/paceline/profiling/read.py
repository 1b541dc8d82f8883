"""Reads the traces of several ranks and puts them on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.profiling.analysis import contradiction_error
from paceline.profiling.assembly import build_rank_trace, move_trace
from paceline.profiling.kineto import TraceFile, read_trace_file, trace_error
from paceline.profiling.matching import bound_offset
from paceline.profiling.rank_trace import MEETINGS, RankTrace
from paceline.units import format_seconds

_ENDINGS = (".json", ".json.gz")
# torch's profiler converts a counter of the processor to the time of day, and collectives may carry another
# clock's time of issue. On one machine both were less than 0.1 ms apart.
_TOLERANCE_NS = 200_000
# Of the clocks of two machines while they record.
_MOST_DRIFT = 1e-4
_MOST_CONTRADICTIONS = 0.1


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """Return the traces of all files, by rank, on the clock of the first one.

    Args:
        paths: files, or folders of files that end in .json or .json.gz.
    """
    files = [path for given in paths for path in _list_files(given)]
    found: dict[int, tuple[Path, RankTrace]] = {}
    for path in files:
        file = read_trace_file(path)
        rank = file.rank if file.rank is not None or len(files) > 1 else 0
        if rank is None:
            raise _double_error(path, "no rank, neither inside nor in the file's name")
        if rank in found:
            raise _double_error(path, f"the same rank as {found[rank][0]}: {rank}")
        found[rank] = path, _build(file, rank)
    return align(separate_groups([trace for _, (_, trace) in sorted(found.items())]))


def _build(file: TraceFile, rank: int) -> RankTrace:
    try:
        return build_rank_trace(file, rank)
    except OverflowError:
        raise trace_error(file.path, "a number in it has more than 64 bits") from None


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise trace_error(path, error.strerror or "it cannot be read") from None
    found = [path / name for name in names if name.endswith(_ENDINGS) and not name.startswith(".")]
    if not found:
        raise trace_error(path, "the folder has no file that ends in .json or .json.gz")
    return found


def _double_error(path: Path, saw: str) -> PacelineError:
    return PacelineError(
        "PL902",
        saw=f"{path} has {saw}.",
        rule="A file is the trace of one rank, named by its distributedInfo or its name: rank-3.json.",
        fix="Give one file per rank, all of the same run.",
    )


def align(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces on the clock of the first one, and with what is missing as a remark.

    The collectives bound by how much clocks differ. Those of two machines are moved to the middle of these
    bounds. If a file names no machine, they are moved only where the collectives contradict equal clocks.
    """
    first, aligned = traces[0], [traces[0]]
    for trace in traces[1:]:
        bounds = bound_offset(first, trace)
        is_known = bool(first.host and trace.host)
        is_equal = bounds is None or bounds[0] - _TOLERANCE_NS <= 0 <= bounds[1] + _TOLERANCE_NS
        if bounds is None or (is_equal and not (is_known and first.host != trace.host)):
            aligned.append(trace)
            continue
        is_same = is_known and first.host == trace.host
        if is_same and (cleared := _clear_contradictions(first, trace)):
            aligned.append(cleared)
            continue
        least, most = bounds
        drift = _MOST_DRIFT * (trace.steps[-1].end_ns - trace.steps[0].begin_ns) if trace.steps else 0.0
        if is_same or least > most + _TOLERANCE_NS + drift:
            reason = f"a collective ended on one before the other had entered it, by {_name_gap(least, most)}"
            raise contradiction_error([first.rank, trace.rank], reason)
        error, middle = abs(most - least) // 2 + 1, (least + most) // 2
        remark = (
            f"The clock of {name_ranks([trace.rank])} is ahead of that of {name_ranks([first.rank])} by "
            f"{middle / 1e6:.3f} ms, within {format_seconds(error / 1e9)}, as the collectives show."
        )
        moved = move_trace(trace, -middle)
        remarks = moved.remarks if is_equal else (*moved.remarks, remark)
        aligned.append(replace(moved, clock_error_ns=error, remarks=remarks))
    return _remark(aligned)


def _clear_contradictions(first: RankTrace, other: RankTrace) -> RankTrace | None:
    """Return the other trace with the collectives that contradict one clock no longer matched.

    `None` if they are too many: the traces are then of different runs. A few happen on a busy machine, where
    threads may take two collectives of one size in another order than they were issued.
    """
    parts = {part.key: part for part in first.collectives if part.operation in MEETINGS}
    kept, num_common, num_bad = [], 0, 0
    for part in other.collectives:
        mine = parts.get(part.key)
        if mine is not None and mine.operation == part.operation:
            num_common += 1
            gap = max(part.issued_ns - mine.end_ns, mine.issued_ns - part.end_ns)
            if gap > _TOLERANCE_NS:
                num_bad += 1
                part = replace(part, sequence=f"contradiction {num_bad} of rank {other.rank}")
        kept.append(part)
    if num_bad > _MOST_CONTRADICTIONS * num_common:
        return None
    remark = (
        f"The times of {num_bad} of {num_common} collectives contradict each other: these are not compared."
    )
    return replace(other, collectives=tuple(kept), remarks=(*other.remarks, remark))


def separate_groups(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces with the members in the names of groups that have one name and different members.

    torch may number the groups of each rank on its own: then groups of one name have nothing in common.
    """
    known: dict[str, set[tuple[int, ...]]] = {}
    for trace in traces:
        for name, members in trace.members.items():
            known.setdefault(name, set()).add(members)
    doubled = {name for name, found in known.items() if len(found) > 1}
    if not doubled:
        return list(traces)
    return [
        replace(
            trace,
            collectives=tuple(
                replace(part, group=f"{part.group} of {name_ranks(trace.members[part.group])}")
                if part.group in doubled & trace.members.keys()
                else part
                for part in trace.collectives
            ),
        )
        for trace in traces
    ]


def _name_gap(least: int, most: int) -> str:
    gap = least - most if least > most else max(least, -most)
    return format_seconds(gap / 1e9)


def _remark(traces: list[RankTrace]) -> list[RankTrace]:
    remarks = []
    world_size = max(trace.world_size for trace in traces)
    missing = set(range(world_size)) - {trace.rank for trace in traces}
    if missing:
        remarks.append(f"No trace of {name_ranks(missing)}: waiting for them counts as transfer.")
    if len({len(trace.steps) for trace in traces}) > 1:
        counts = ", ".join(f"rank {trace.rank} {len(trace.steps)}" for trace in traces)
        remarks.append(f"The traces have different numbers of steps ({counts}): common ones are compared.")
    hosts = {trace.host for trace in traces}
    if len(traces) > 1 and (len(hosts) > 1 or "" in hosts) and not any(t.clock_error_ns for t in traces):
        remarks.append("The machines' clocks are taken as equal: the files do not contain their offsets.")
    return [replace(traces[0], remarks=(*traces[0].remarks, *remarks)), *traces[1:]]
