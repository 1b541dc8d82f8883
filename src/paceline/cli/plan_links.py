"""`paceline plan links RECIPE --link 100mbit,50ms --step 0.3`: how to train over a slow link."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from paceline.cli.output import add_recipe_flags, format_rows
from paceline.units import format_seconds


def add_links(kinds: Any) -> None:
    """Add the plan of a slow link to what `paceline plan` can do."""
    parser = kinds.add_parser(
        "links",
        help="whole gradients, compressed ones or islands, over a slow link between nodes",
        description="Predicts the step for each, in the order of what they cost in loss, and picks the first "
        "that reaches 90%% of the speed without communication. docs/slow_networks.md has what was measured.",
    )
    parser.add_argument("target", metavar="RECIPE", help="a recipe's .toml file")
    parser.add_argument("--link", metavar="RATE,RTT", required=True, help='for example "100mbit,50ms"')
    parser.add_argument(
        "--step", metavar="SECONDS", type=float, required=True,
        help="of a step without communication, as `step_s` in the metrics of a run on one node",
    )  # fmt: skip
    parser.add_argument("--nodes", metavar="N", type=int, default=2, help="default 2")
    add_recipe_flags(parser, "model.layers=80", has_vocab=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict and print; return 0.

    Raises:
        PacelineError: PL930 for a link, PL932 for a number that cannot be.
    """
    from paceline.plan.cluster import check_number
    from paceline.plan.links import list_choices, pick, read_link
    from paceline.plan.recipe_costs import of_recipe
    from paceline.recipe import load_recipe

    link = read_link(args.link)
    step_s, nodes = check_number("--step", args.step), int(check_number("--nodes", args.nodes))
    costs = of_recipe(load_recipe(args.target, args.set), args.vocab_size)
    choices = list_choices(int(costs.num_parameters), nodes, step_s, link)
    picked = pick(choices)
    if args.json:
        print(json.dumps({"choices": [asdict(choice) for choice in choices], "pick": picked.name}))
        return 0
    rows = [(each.name, format_seconds(each.step_s), f"{each.share:.0%}") for each in choices]
    print(format_rows([("", "step", "of the speed"), *rows]))
    settings = " ".join(f"--set {key}={value}" for key, value in picked.settings.items())
    print(f"\npick: {picked.name}" + (f" ({settings})" if settings else ""))
    print("The ranks of a node count as one: they divide the model by dp_shard or tp.")
    return 0
