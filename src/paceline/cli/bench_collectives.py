"""`paceline bench collectives`: measures each collective at each size."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.cli.output import format_rows
from paceline.errors import PacelineError
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.bench.collectives import Cell, Collectives

_DESCRIPTION = """
Measures each collective at each size: time, bus bandwidth as nccl-tests define it, and the time that
follows from the smallest and the largest size. Runs on the CPU with gloo. Started by torchrun or
`paceline run -m paceline bench collectives`, it joins their ranks.
"""
_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_MOST_BYTES = 1 << 32
_NEAR = 0.15


def add_collectives(kinds: Any) -> None:
    """Add the benchmark `collectives` to those of `paceline bench`."""
    text = "every collective's time and bandwidth by size"
    parser = kinds.add_parser("collectives", help=text, description=_DESCRIPTION)
    parser.add_argument("--nproc", metavar="N", type=int, help="ranks to start on this machine (default 2)")
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help="sizes in bytes, or with KB, MB or GB, which are powers of 1024 (default 64,4KB,64KB,1MB,8MB)",
    )
    parser.add_argument(
        "--repeats", metavar="R", type=int, default=15, help="calls per operation and size (default 15)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `paceline bench collectives`; return 0."""
    from paceline.bench.collectives import SIZES, measure_collectives
    from paceline.bench.starts import check_counts, choose_ranks, refuse_one_rank
    from paceline.place import read_environment

    num_ranks, joins = choose_ranks(args.nproc, "bench collectives")
    sizes = SIZES if args.sizes is None else parse_sizes(args.sizes)
    check_counts(repeats=args.repeats)
    refuse_one_rank(num_ranks)
    found = measure_collectives(None if joins else num_ranks, sizes=sizes, repeats=args.repeats)
    if not joins or read_environment(os.environ).rank == 0:
        print(json.dumps(asdict(found)) if args.json else describe_collectives(found))
    return 0


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of `64,4KB,1MB` in bytes, ascending."""
    sizes = set()
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)\s*(|B|KB|MB|GB)", word.strip().upper())
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if not 0 < size <= _MOST_BYTES:
            raise PacelineError(
                "PL620",
                saw=f"--sizes {text}: {word.strip()!r}.",
                rule=f"Sizes are whole numbers from 1 byte to {format_bytes(_MOST_BYTES)}, alone or with KB, "
                "MB or GB.",
                fix="Write for example --sizes 64,4KB,1MB.",
            )
        sizes.add(size)
    return sorted(sizes)


def describe_collectives(found: Collectives) -> str:
    """Return a row per operation and size, and the line that predicts each operation."""
    rows: list[tuple[str, ...]] = [("operation", "size", "time", "busbw", "predicted")]
    rows += [_describe_cell(cell) for cell in found.cells]
    parts = [_describe_ranks(found), format_rows(rows), *_describe_lines(found)]
    return "\n\n".join([*parts, "Slow links and nodes: paceline doctor --nnodes N."])


def _describe_lines(found: Collectives) -> Iterator[str]:
    errors = [abs(cell.error) for cell in found.cells if cell.error is not None]
    if not errors:
        return
    near = sum(error <= _NEAR for error in errors) / len(errors)
    yield (
        "The line through the smallest and the largest size, as `paceline plan` has it, misses the sizes "
        f"between\nby {median(errors):.0%} in the median; {near:.0%} are within {_NEAR:.0%}:"
    )
    rows = [(name, format_seconds(s), _rate(rate)) for name, (s, rate) in found.lines.items()]
    yield format_rows([("operation", "empty call", "busbw"), *rows])


def _describe_ranks(found: Collectives) -> str:
    ranks, nodes = len(found.nodes), len(found.hosts)
    lines = [
        f"collectives on {ranks} ranks of {nodes} node{'s' if nodes > 1 else ''}, {found.backend}; "
        f"median and {found.cells[0].time_s.confidence:.0%} confidence interval",
    ]
    if ranks // nodes > found.num_cores:
        lines.append(f"  more ranks than the {found.num_cores} cores: they wait for each other")
    return "\n".join(lines)


def _describe_cell(cell: Cell) -> tuple[str, ...]:
    taken = cell.time_s
    return (
        cell.operation,
        format_bytes(cell.num_bytes) if cell.bus_bytes_per_s is not None else "-",
        f"{format_seconds(taken.median)} ({format_seconds(taken.low)} to {format_seconds(taken.high)})",
        _rate(cell.bus_bytes_per_s),
        "-" if cell.predicted_s is None else f"{format_seconds(cell.predicted_s)} ({cell.error:+.0%})",
    )


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e6:.4g} MB/s"
