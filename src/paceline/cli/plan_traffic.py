"""`paceline plan traffic RECIPE.toml`: prints the bytes that a step sends, by axis."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.plan.traffic_table import AxisTraffic

_DESCRIPTION = """
Computes the bytes that a rank sends in one optimizer step over each axis of the layout, without starting
any rank. An axis is counted where a formula is tested to be exact; the other rows name the reason.
"""
_NOT_COUNTED = (
    "not counted: what ranks agree on in each step, comparisons of copies, evaluation and checkpoints"
)


def add_traffic(kinds: Any) -> None:
    """Add `traffic` to what `paceline plan` can do."""
    text = "bytes of a step's communication, by axis of a recipe's layout"
    parser = kinds.add_parser("traffic", help=text, description=_DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="a .toml file, for example recipes/gpt-stdlib.toml")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="ranks (default: the product of the layout's degrees)"
    )
    add_recipe_options(parser, "layout.tp=2")
    parser.set_defaults(run=run)


def add_recipe_options(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the options of what is planned for a recipe, with an example of `--set`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"overrides a key of the recipe, for example {example}; may be given several times",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="token ids, if data.tokenizer is a file of your own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0.

    Raises:
        PacelineError: for a recipe or a layout that cannot be, PL928 without the number of token ids.
    """
    from paceline.plan.traffic_table import plan_recipe_traffic
    from paceline.recipe import load_recipe, settle_recipe

    recipe = load_recipe(args.recipe, args.set)
    settled = settle_recipe(
        recipe, recipe.list_layouts()[0].fewest_ranks if args.nproc is None else args.nproc
    )
    layout, rows = settled.layout, plan_recipe_traffic(settled.recipe, settled.layout, args.vocab_size)
    if args.json:
        table = {"layout": str(layout), "ranks": layout.num_ranks, "axes": [asdict(row) for row in rows]}
        print(json.dumps(table | {"not_counted": _NOT_COUNTED}))
        return 0
    print(f"layout {layout}, {layout.num_ranks} ranks: sent by a rank in one step\n")
    print(f"{'axis':<14}{'ranks':>6}{'bytes':>12}  what")
    for row in rows:
        print(_format_row(row))
    if not rows:
        print("one rank sends nothing")
    print(f"\n{_NOT_COUNTED}")
    return 0


def _format_row(row: AxisTraffic) -> str:
    sent = "?" if row.num_bytes is None else format_bytes(round(row.num_bytes))
    return f"{row.axis:<14}{row.degree:>6}{sent:>12}  {row.what}"
