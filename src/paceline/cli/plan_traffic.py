"""`paceline plan traffic RECIPE.toml`: prints bytes and seconds of a step's communication, by axis."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.plan.traffic_time import TimedTraffic

_DESCRIPTION = """
Computes the bytes that a rank sends in one optimizer step over each axis of the layout, without starting
any rank. An axis is counted where a formula is tested to be exact; the other rows name the reason. With
--links, each row also has the predicted seconds of its collectives, as if they overlapped with nothing.
"""
_NOT_COUNTED = (
    "not counted: what ranks agree on in each step, comparisons of copies, evaluation and checkpoints"
)


def add_traffic(kinds: Any) -> None:
    """Add `traffic` to what `paceline plan` can do."""
    text = "bytes and seconds of a step's communication, by axis of a recipe's layout"
    parser = kinds.add_parser("traffic", help=text, description=_DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="a .toml file, for example recipes/gpt-stdlib.toml")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="ranks (default: the product of the layout's degrees)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key of the recipe, for example layout.tp=2; may be given several times",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="token ids, if data.tokenizer is a file of your own"
    )
    parser.add_argument(
        "--links",
        metavar="FILE",
        help="links that `paceline bench collectives --save-links FILE` measured between as many ranks: "
        "predicts the seconds of each row, for gloo on CPUs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0.

    Raises:
        PacelineError: for a recipe or a layout that cannot be, PL928 without the number of token ids, PL950
            for a file of links that cannot be used, PL925 for one of more or fewer ranks.
    """
    from paceline.plan.links_file import read_links
    from paceline.plan.traffic_table import plan_recipe_traffic
    from paceline.plan.traffic_time import TimedTraffic, time_recipe_traffic
    from paceline.recipe import load_recipe, settle_recipe

    recipe = load_recipe(args.recipe, args.set)
    settled = settle_recipe(
        recipe, recipe.list_layouts()[0].fewest_ranks if args.nproc is None else args.nproc
    )
    layout, rows = settled.layout, plan_recipe_traffic(settled.recipe, settled.layout, args.vocab_size)
    timed = [TimedTraffic(row, None) for row in rows]
    if args.links is not None:
        timed = time_recipe_traffic(rows, settled.recipe, layout, read_links(Path(args.links)))
    if args.json:
        print(json.dumps(_build_table(timed, str(layout), layout.num_ranks, args.links)))
        return 0
    print(f"layout {layout}, {layout.num_ranks} ranks: sent by a rank in one step\n")
    seconds = "" if args.links is None else f"{'seconds':>10}"
    print(f"{'axis':<14}{'ranks':>6}{'bytes':>12}{seconds}  what")
    for each in timed:
        print(_format_row(each, has_times=args.links is not None))
    if not rows:
        print("one rank sends nothing")
    if args.links is not None and rows:
        print(f"\n{_format_total(timed, args.links)}")
    print(f"\n{_NOT_COUNTED}")
    return 0


def _build_table(
    timed: Sequence[TimedTraffic], layout: str, num_ranks: int, links: str | None
) -> dict[str, Any]:
    """Return what `--json` prints; times and their reasons are there with links alone."""
    axes = []
    for each in timed:
        times = {"time_s": each.time_s, "no_time": each.reason or None}
        axes.append(asdict(each.traffic) | ({} if links is None else times))
    table: dict[str, Any] = {"layout": layout, "ranks": num_ranks, "axes": axes, "not_counted": _NOT_COUNTED}
    if links is not None:
        predicted = [each.time_s for each in timed if each.time_s is not None]
        table |= {
            "links": links,
            "total_s": sum(predicted),
            "total_lacks": [each.traffic.axis for each in timed if each.time_s is None],
        }
    return table


def _format_row(timed: TimedTraffic, *, has_times: bool) -> str:
    row = timed.traffic
    sent = "?" if row.num_bytes is None else format_bytes(round(row.num_bytes))
    time, what = "", row.what
    if has_times:
        time = f"{'?' if timed.time_s is None else format_seconds(timed.time_s):>10}"
        if timed.reason not in ("", row.what):
            what += f"; seconds: {timed.reason}"
    return f"{row.axis:<14}{row.degree:>6}{sent:>12}{time}  {what}"


def _format_total(timed: Sequence[TimedTraffic], links: str) -> str:
    total = format_seconds(sum(each.time_s for each in timed if each.time_s is not None))
    lacking = [each.traffic.axis for each in timed if each.time_s is None]
    if len(lacking) == len(timed):
        return "total: not predicted"
    amount = f"at least {total} (without {', '.join(lacking)})" if lacking else total
    return (
        f"total: {amount} per step if nothing overlaps, with computation or between axes\n"
        f"seconds: predicted for gloo on CPUs, from {links}"
    )
