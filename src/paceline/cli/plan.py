"""`paceline plan`: its parser; and `schedule`, which simulates and draws a pipeline without any ranks."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import replace

from paceline.cli.command_words import take_default
from paceline.cli.plan_layouts import NAME, add_layouts
from paceline.cli.plan_links import add_links
from paceline.errors import PacelineError
from paceline.pipeline.picture import draw_text
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.simulate import Costs, Simulation, simulate

# A simulated action takes about 10 microseconds; a step of more would keep the terminal waiting.
_MOST_ACTIONS = 200_000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("plan", help="which layout fits and is fastest, before renting machines")
    kinds = parser.add_subparsers(dest="plan", required=True, metavar="TARGET|WHAT")
    add_layouts(kinds)
    add_links(kinds)
    schedule = kinds.add_parser(
        "schedule",
        help="when each rank of a pipeline computes which microbatch, and how long it waits",
        description="Simulates one step of a pipeline and draws it. Without NAME, compares all known "
        "schedules.",
    )
    schedule.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="1f1b or another known schedule",
    )
    schedule.add_argument(
        "--ranks", metavar="P", type=int, default=4, help="ranks of the pipeline (default 4)"
    )
    schedule.add_argument(
        "--microbatches", metavar="M", type=int, default=8, help="microbatches of a step (default 8)"
    )
    schedule.add_argument("--chunks", metavar="V", type=int, help="stages per rank, for interleaved and bfs")
    schedule.add_argument(
        "--costs",
        metavar="F,I,W",
        default="1,1,1",
        help="durations of a forward, of the gradient of a stage's input and of those of its weights, for "
        "all stages of a rank together (default 1,1,1)",
    )
    schedule.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    schedule.set_defaults(run=run)
    take_default(parser, NAME, lambda word: "." in word or ":" in word)


def run(args: argparse.Namespace) -> int:
    """Simulate and print; return 0.

    Raises:
        PacelineError: as `make_schedule`; PL476 for numbers out of range.
    """
    _check_numbers(args)
    costs = _read_costs(args.costs)
    if args.name is None:
        return _compare(args, costs)
    from paceline.pipeline.orders import make_schedule  # loads all of recipes, too slow for --help

    schedule = make_schedule(args.name, args.ranks, args.microbatches, args.chunks)
    result = simulate(schedule, _spread(costs, schedule))
    if args.json:
        print(
            json.dumps(
                _as_table(schedule, result) | {"actions": [list(map(str, a)) for a in schedule.actions]}
            )
        )
        return 0
    # The picture has a column per unit, so it shows the order with equal costs; the numbers are of the costs.
    print(draw_text(schedule, simulate(schedule), shutil.get_terminal_size((120, 24)).columns))
    print(_describe(schedule, result))
    return 0


def _spread(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of a stage, from those of all stages of a rank."""
    per_rank = max(len(schedule.list_stages(rank)) for rank in range(schedule.num_ranks))
    forward, own, weight = (value / per_rank for value in (costs.forward, costs.input, costs.weight))  # type: ignore[operator]
    return replace(costs, forward=forward, input=own, weight=weight, activations=1 / per_rank)


def _compare(args: argparse.Namespace, costs: Costs) -> int:
    from paceline.pipeline.orders import NAMES, make_schedule

    rows: list[dict[str, object]] = []
    for name in NAMES:
        chunks = args.chunks if name in ("interleaved", "bfs") else None
        try:
            schedule = make_schedule(name, args.ranks, args.microbatches, chunks)
        except PacelineError as error:
            rows.append({"name": name, "refused": str(error)})
            continue
        rows.append(_as_table(schedule, simulate(schedule, _spread(costs, schedule))))
    if args.json:
        print(json.dumps({"schedules": rows}))
        return 0
    print(f"{args.ranks} ranks, {args.microbatches} microbatches\n")
    print(f"{'schedule':<13}{'stages per rank':>16}{'idle':>8}{'kept at once':>14}")
    for row in rows:
        if "refused" in row:
            print(f"{row['name']:<13}{row['refused']}")
        else:
            print(
                f"{row['name']:<13}{row['stages_per_rank']:>16}{row['idle_share']:>8.1%}{row['most_kept']:>14.1f}"
            )
    print("\nkept at once: microbatches whose activations the fullest rank holds for all of its stages")
    return 0


def _as_table(schedule: Schedule, result: Simulation) -> dict[str, object]:
    return {
        "name": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages_per_rank": schedule.num_stages // schedule.num_ranks,
        "time": result.total,
        "idle_share": result.idle_share,
        "most_kept": max(result.most_kept),
        "kept_by_rank": list(result.most_kept),
    }


def _describe(schedule: Schedule, result: Simulation) -> str:
    kept = ", ".join(f"{number:g}" for number in result.most_kept)
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches\n"
        f"idle: {result.idle_share:.1%} of the ranks' time ({result.idle_over_busy:.1%} of their work)\n"
        f"microbatches whose activations a rank keeps at once: {kept}"
    )


def _check_numbers(args: argparse.Namespace) -> None:
    for word in ("ranks", "microbatches"):
        if getattr(args, word) < 1:
            raise _range_error(f"--{word} {getattr(args, word)}.", "A pipeline has at least one of each.")
    num_actions = 3 * args.ranks * args.microbatches * (args.chunks or 2)
    if num_actions > _MOST_ACTIONS:
        raise _range_error(
            f"{args.ranks} ranks with {args.microbatches} microbatches: up to {num_actions} actions.",
            f"At most {_MOST_ACTIONS} are simulated.",
        )


def _read_costs(text: str) -> Costs:
    try:
        forward, own, weight = (float(word) for word in text.split(","))
    except ValueError:
        forward = own = weight = -1.0
    if not all(0 <= cost < math.inf for cost in (forward, own, weight)) or not forward + own + weight:
        raise _range_error(f"--costs {text}.", "It is three numbers of at least 0, not all of them 0.")
    return Costs(forward, own, weight)


def _range_error(saw: str, rule: str) -> PacelineError:
    return PacelineError(
        "PL476", saw=saw, rule=rule, fix="Try for example --ranks 4 --microbatches 8 --costs 1,1,1."
    )
