"""`paceline compare A B`: compares the losses and the speed of two runs, with a gate for CI."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.spread import Spread
from paceline.errors import PacelineError
from paceline.units import format_count

# Steps of each run that are left out of its speed, while caches and clocks settle.
_WARM_UP = 3
_DESCRIPTION = """
Compares run B with run A, by their metrics: steps, losses, and samples per second with 95% intervals of the
medians. Run it on folders of runs, or on their metrics.jsonl.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "compare", help="compare two runs: steps, losses, throughput", description=_DESCRIPTION
    )
    parser.add_argument("a", metavar="A", type=Path, help="the folder of the run to compare with")
    parser.add_argument("b", metavar="B", type=Path, help="the folder of the other run")
    parser.add_argument(
        "--max-regression",
        metavar="PERCENT",
        help="exit with 1 if B is slower than A by more than this, for example 5%%, or its loss is higher by "
        "more than this",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if B is worse than `--max-regression` allows."""
    limit = _read_limit(args.max_regression)
    a, b = _read_run(args.a), _read_run(args.b)
    found = _compare(a, b)
    worse = [] if limit is None else _list_worse(found, limit)
    if args.json:
        print(json.dumps(found | {"worse": worse}))
        return int(bool(worse))
    print(f"{'':<16} {'A':>14} {'B':>14}")
    for name in ("steps", "last_loss", "samples_per_s"):
        print(f"{name.replace('_', ' '):<16} {_format(found['a'][name]):>14} {_format(found['b'][name]):>14}")
    if found["speed"] is not None:
        low, high = found["speed_interval"]
        print(f"speed of B / A   {found['speed']:.3f} ({low:.3f}..{high:.3f})")
    first = found["first_difference"]
    same = f"the same on all {found['common_steps']} common steps"
    print(f"losses           {same if first is None else f'differ from step {first} on'}")
    for reason in worse:
        print(f"worse: {reason}")
    return int(bool(worse))


def _compare(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> dict[str, Any]:
    common = sorted(a.keys() & b.keys())
    first = next((step for step in common if a[step].get("loss") != b[step].get("loss")), None)
    old, new = (_measure_speed(rows) for rows in (a, b))
    speed, interval = None, None
    if old is not None and new is not None:
        speed, interval = new.median / old.median, (new.low / old.high, new.high / old.low)
    # Where one run is longer, their losses are compared at the same step.
    end = [step for step in common if step > common[-1] - max(1, len(common) // 10)] if common else []
    return {
        "a": _describe(a, old),
        "b": _describe(b, new),
        "common_steps": len(common),
        "first_difference": first,
        "loss_at_end": [_mean([rows[step].get("loss") for step in end]) for rows in (a, b)],
        "speed": speed,
        "speed_interval": interval,
    }


def _list_worse(found: dict[str, Any], limit: float) -> list[str]:
    worse = []
    if found["speed"] is not None and found["speed_interval"][1] < 1 - limit:
        worse.append(f"B has {found['speed']:.1%} of the speed of A, surely less than {1 - limit:.1%}")
    before, after = found["loss_at_end"]
    if before is not None and (after is None or after > before + limit * abs(before)):
        worse.append(
            f"at the last common steps, the loss of B is {_format(after)} and that of A {_format(before)}"
        )
    return worse


def _describe(rows: dict[int, dict[str, Any]], speed: Spread | None) -> dict[str, Any]:
    last, median = max(rows), None if speed is None else speed.median
    return {"steps": last, "last_loss": rows[last].get("loss"), "samples_per_s": median}


def _measure_speed(rows: dict[int, dict[str, Any]]) -> Spread | None:
    """Return the samples per second, `None` for too few steps."""
    found = [rows[step].get("samples_per_s") for step in sorted(rows)[_WARM_UP:]]
    speeds = [each for each in found if isinstance(each, (int, float)) and each > 0]
    return Spread.of(speeds) if speeds else None


def _mean(values: list[Any]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return format_count(value) if abs(value) >= 1000 else f"{value:.6g}"


def _read_run(path: Path) -> dict[int, dict[str, Any]]:
    from paceline.train.metrics import read_rows

    file = path / "metrics.jsonl" if path.is_dir() else path
    rows = {row["step"]: row for row in read_rows(file)} if file.is_file() else {}
    if not rows:
        raise PacelineError(
            "PL740",
            saw=f"{file} {'has no rows' if file.exists() else 'does not exist'}.",
            rule="A run's folder has metrics.jsonl, with a row per step.",
            fix="Name the folders of two runs that have taken steps: paceline compare runs/a runs/b.",
        )
    return rows


def _read_limit(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        limit = float(text.removesuffix("%")) / 100
        if not 0 <= limit < 1:
            raise ValueError
    except ValueError:
        raise PacelineError(
            "PL740",
            saw=f"--max-regression {text}.",
            rule="It is a percentage from 0 to below 100.",
            fix="Pass for example --max-regression 5%.",
        ) from None
    return limit
