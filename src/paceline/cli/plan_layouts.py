"""`paceline plan TARGET --cluster ...`: which layouts fit, which is fastest, and how certain that is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.output import add_recipe_flags, format_rows
from paceline.errors import PacelineError
from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.plan.cluster import Cluster
    from paceline.plan.costs import ModelCosts
    from paceline.plan.fit import Constants, Interval
    from paceline.plan.runs import Calibration
    from paceline.plan.search import Candidate, Plan
    from paceline.recipe import Rules

NAME = "layouts"
_FILE = "cluster.toml"
_MOST_FALLEN = 8
_PEAKS = "80% of published peaks, relative to their count"
_DESCRIPTION = """
Computes the memory and the step time of every legal layout of a model on a cluster that may not exist yet.
Prints the fastest that fit, with the interval in which the measured time should be, and the reasons against
the others. Exit code 1 if no layout fits. docs/plan.md has every term with its source and its measured error.
"""


def add_layouts(kinds: Any) -> None:
    """Add the plan of layouts to what `paceline plan` can do."""
    parser = kinds.add_parser(NAME, help="which layouts fit, and which is fastest (also without this word)",
                              description=_DESCRIPTION)  # fmt: skip
    parser.add_argument("target", metavar="TARGET", help="a recipe's .toml file, or FILE.py:FUNCTION")
    parser.add_argument(
        "--cluster",
        metavar="WORDS|FILE",
        default=_FILE,
        help='for example "8 nodes of 8 H100-80, 400 Gbit/s", or the .toml file of `paceline probe` '
        "(default cluster.toml)",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="use N ranks of the cluster: whole nodes, or one"
    )
    parser.add_argument("--layout", metavar="LAYOUT", help="plan this layout alone")
    parser.add_argument(
        "--memory", metavar="GB", type=float, help="bytes of a rank that may be used, in 10^9"
    )
    parser.add_argument(
        "--calibrate", metavar="RUN", type=Path, help="a run's folder: its measured steps narrow the interval"
    )
    parser.add_argument(
        "--scale", action="store_true", help="compare numbers of nodes: time and cost of a token on each"
    )
    parser.add_argument(
        "--batch", metavar="FILE.py:FUNCTION", help="for a model of your own: makes one microbatch"
    )
    parser.add_argument(
        "--global-batch", metavar="N", type=int, default=0,
        help="for a model of your own: samples per step (default: one microbatch per rank)",
    )  # fmt: skip
    parser.add_argument(
        "--recorded", metavar="PROFILE", type=Path,
        help="traces of `paceline profile` of the script TARGET: its step on other ranks and links",
    )  # fmt: skip
    add_recipe_flags(parser, "model.layers=80", has_vocab=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print; return 0, or 1 if nothing fits.

    Raises:
        PacelineError: for a target, cluster or layout that cannot be planned.
    """
    from paceline.plan.cluster import check_number, read_cluster
    from paceline.plan.fit import load_constants
    from paceline.plan.runs import calibrate
    from paceline.plan.search import check_ranks, plan_one, search

    _refuse_unused(args)
    fit = load_constants()
    if args.cluster == _FILE and not Path(_FILE).exists():
        raise PacelineError(
            "PL930",
            saw=f"no --cluster, and no {_FILE} in the working folder.",
            rule="A plan is for a cluster: described in words, or measured.",
            fix='Write for example --cluster "8 nodes of 8 H100-80", or measure one: paceline probe.',
        )
    cluster = read_cluster(args.cluster, fit.links)
    if args.nproc is not None:
        cluster = check_ranks(cluster, args.nproc)
    if args.recorded is not None:
        from paceline.cli import plan_recorded

        return plan_recorded.run(args, cluster, fit)
    limit = None if args.memory is None else 1e9 * check_number("--memory", args.memory)
    costs, rules = _read_target(args, cluster)
    calibration = None
    if args.calibrate is not None:
        calibration = calibrate(args.calibrate, costs, cluster, fit)
        costs = replace(costs, factor=calibration.factor)
    if args.scale:
        return _scale(costs, rules, cluster, fit, limit)
    if args.layout is not None:
        found = plan_one(costs, rules, cluster, fit, args.layout, limit=limit)
    else:
        found = search(costs, rules, cluster, fit, limit=limit)
    if args.json:
        print(json.dumps(as_table(found, calibration)))
    else:
        print("\n".join(describe(found, rules, fit, limit, calibration)))
    return 0 if found.fitting else 1


# Options that have no effect, by what is planned.
_UNUSED = {
    "a model of your own": ("set", "vocab_size", "calibrate"),
    "a recipe": ("batch", "global_batch"),
    "a recorded script": (
        *("layout", "memory", "calibrate", "scale", "batch", "global_batch", "set", "vocab_size"),
    ),
    "several numbers of nodes": ("layout", "json"),
}


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise PL941 for an option that would have no effect."""
    kind = "a recipe" if args.target.endswith(".toml") else "a model of your own"
    kinds = [kind if args.recorded is None else "a recorded script"]
    for each in [*kinds, *["several numbers of nodes"] * args.scale]:
        unused = [f"--{name.replace('_', '-')}" for name in _UNUSED[each] if getattr(args, name)]
        if unused:
            raise PacelineError(
                "PL941",
                saw=f"{' and '.join(unused)} with {each}.",
                rule="The plan would not use it.",
                fix="Leave it out.",
            )


def _read_target(args: argparse.Namespace, cluster: Cluster) -> tuple[ModelCosts, Rules]:
    """Return costs and rules of a recipe or of a module.

    Raises:
        PacelineError: PL934 for a target that is neither.
    """
    if args.target.endswith(".toml"):
        from paceline.plan.recipe_costs import of_recipe
        from paceline.recipe import Rules, load_recipe

        recipe = load_recipe(args.target, args.set)
        if recipe.train.device == "auto":
            device = "cpu" if cluster.processor.is_cpu else "cuda"
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": device})})
        return of_recipe(recipe, args.vocab_size), Rules.of(recipe)
    if ":" in args.target:
        if args.batch is None:
            raise PacelineError(
                "PL939",
                saw=f"{args.target} without --batch.",
                rule="The costs of a model of your own come from its forward of one microbatch.",
                fix="Give a function that makes one: --batch my.module:make_batch.",
            )
        from paceline.bench.traced import plan_module
        from paceline.plan.cluster import check_number

        if args.global_batch:
            check_number("--global-batch", args.global_batch)
        return plan_module(args.target, args.batch, args.global_batch, cluster.num_ranks)
    raise PacelineError(
        "PL934",
        saw=f"the target {args.target!r}.",
        rule="A plan is made for a recipe, which ends in .toml, for a function that builds a model, as "
        "train.py:build_model, or for a script with --recorded.",
        fix="Write for example paceline plan recipes/gpt-stdlib.toml, or record the script: paceline profile "
        "--nproc-per-node 2 train.py.",
    )


def find_unknown(found: Plan, candidate: Candidate) -> list[str]:
    """Return what the published runs behind the interval have nothing alike of."""
    from paceline.plan.fit import load_fit

    seen, layout, cluster = load_fit()["seen"], candidate.layout, found.cluster
    unknown = []
    if not cluster.is_probed and cluster.processor.name not in seen["processors"]:
        unknown.append(f"no published run on {cluster.processor.name}")
    if layout.pp > 1 and layout.schedule not in seen["schedules"]:
        unknown.append(f"no published run with schedule={layout.schedule}")
    if layout.num_ranks > seen["most_ranks"]:
        unknown.append(f"no published run on more than {seen['most_ranks']} ranks")
    unknown += [f"no published run with {axis}" for axis in layout.list_several() if axis not in seen["axes"]]
    if not found.costs.is_transformer:
        unknown.append("no published run of another model than a transformer")
    return unknown


def find_sent(found: Plan, candidate: Candidate) -> dict[str, float]:
    """Return the bytes that a rank sends per step, by axis."""
    from paceline.plan.step import cut_stages
    from paceline.plan.traffic import count_sent

    return count_sent(found.costs, candidate.layout, cut_stages(found.costs, candidate.layout))


def find_bar(found: Plan, candidate: Candidate, calibration: Calibration | None) -> Interval:
    """Return the interval of a candidate's time."""
    from paceline.plan.fit import Known, find_interval

    known: Known = (
        "calibrated" if calibration is not None else "probed" if found.cluster.is_probed else "hardware"
    )
    unknown = () if calibration is not None else find_unknown(found, candidate)
    return find_interval(candidate.seconds, known, unknown)


def describe(
    found: Plan, rules: Rules, fit: Constants, limit: float | None, calibration: Calibration | None
) -> Iterator[str]:
    """Yield the lines of the report."""
    from paceline.plan.search import find_limit, grow, vary

    costs, cluster = found.costs, found.cluster
    room = find_limit(cluster) if limit is None else limit
    text = f" of {costs.tokens} tokens" if costs.tokens > 1 else ""
    frozen = sum(part.frozen.divide(1) for part in costs.parts)
    kept = f" and {format_bytes(frozen)} of frozen ones and buffers" if frozen else ""
    yield (
        f"{costs.name}: {format_count(costs.num_parameters)} parameters{kept}, {costs.global_batch} "
        f"samples{text} per step, {costs.microbatch} per microbatch"
    )
    yield f"{cluster} = {cluster.num_ranks} rank{'s' * (cluster.num_ranks > 1)}"
    yield from (f"  {remark}" for remark in (*cluster.remarks, *costs.remarks))
    if calibration is not None:
        yield from calibration.describe()
    yield f"{found.num_legal} of {found.num_candidates} layouts are legal"
    if not found.fitting:
        yield ""
        yield from _describe_shortage(found, room)
        if more := grow(costs, rules, cluster, fit, limit=limit):
            first = more.fitting[0]
            yield (
                f"The least that fits by doubling the nodes: {more.cluster.num_ranks} ranks, {first.layout} "
                f"({format_seconds(first.seconds)} per step)."
            )
        return
    best = found.fitting[0]
    rows: list[tuple[str, ...]] = [
        ("layout", "step", "80% interval", "memory", "compute", "waits for others")
    ]
    bars = {}
    for candidate in found.best_by_family[:5]:
        bars[candidate.layout] = bar = find_bar(found, candidate, calibration)
        rows.append(_describe_row(candidate, bar))
    yield f"\nfastest of each kind that fits {room / 1e9:.1f} GB:\n"
    yield format_rows(rows)
    if found.ties:
        names = "; ".join(str(candidate.layout) for candidate in found.ties)
        yield f"\ntie: less than {found.tie:.0%} slower than the first, which no plan can tell apart: {names}"
    yield from _describe_best(found, best, bars[best.layout], room)
    if smaller := found.front[1:5]:
        yield "\nless memory for more time:"
        yield from (
            f"  {c.demand.high / 1e9:.1f} GB, {format_seconds(c.seconds)}: {c.layout}" for c in smaller
        )
    slower = found.best_by_family[5:]
    if slower or found.fallen:
        yield "\nother kinds:"
    for candidate in slower:
        why = _name_reason(candidate, best)
        times = candidate.seconds / best.seconds
        yield f"  {candidate.family}: {times:.2f} times the time ({why}), as {candidate.layout}"
    yield from (f"  {family}: {why}" for family, why in found.fallen.items())
    if changes := vary(found, fit):
        yield "\nwhat would change the answer:"
        yield from (f"  {words}: {layout}" for words, layout in changes)


def _describe_row(candidate: Candidate, bar: Interval) -> tuple[str, ...]:
    time = candidate.time
    assert time is not None
    return (
        str(candidate.layout),
        format_seconds(time.total),
        f"{format_seconds(bar.low_s)} to {format_seconds(bar.high_s)}",
        f"{candidate.demand.low / 1e9:.1f} to {candidate.demand.high / 1e9:.1f} GB",
        f"{(time.compute + time.recompute) / time.total:.0%}",
        f"{time.communication / time.total:.0%}",
    )


def _describe_best(found: Plan, best: Candidate, bar: Interval, room: float) -> Iterator[str]:
    from paceline.plan.fit import load_fit

    assert best.time is not None
    fit, costs = load_fit(), found.costs
    yield f"\n{best.layout}"
    terms = sorted(vars(best.time).items(), key=lambda term: -term[1])
    yield "  time: " + ", ".join(f"{name} {format_seconds(s)}" for name, s in terms if s > 0.001 * bar.s)
    tokens = costs.global_batch * costs.tokens / bar.s
    yield f"  {format_count(tokens)} {'tokens' if costs.tokens > 1 else 'samples'}/s"
    if sent := find_sent(found, best):
        each = ", ".join(f"{axis} {format_bytes(size)}" for axis, size in sent.items())
        yield f"  a rank sends per step: {each}"
    stage = f" on stage {best.demand.stage}" if best.layout.pp > 1 else ""
    yield (
        f"  memory when {best.demand.instant}{stage}: "
        + ", ".join(
            f"{name.replace('_', ' ')} {num / 1e9:.2f}"
            for name, num in best.demand.terms.items()
            if abs(num) >= 5e6
        )
        + f" GB; {_PEAKS}: {best.demand.low / 1e9:.1f} to {best.demand.high / 1e9:.1f} of {room / 1e9:.1f} GB"
    )
    yield (
        f"  how certain: the interval holds {bar.level:.0%} of the {fit['rows']} published steps, each "
        f"publication predicted without its own rows (median error {fit['median_error']:.1%})"
    )
    yield from (f"  {remark}" for remark in bar.remarks)


def _name_reason(candidate: Candidate, best: Candidate) -> str:
    """Return the term that is most behind the best one's."""
    assert candidate.time is not None
    assert best.time is not None
    name, more = max(
        ((name, s - getattr(best.time, name)) for name, s in vars(candidate.time).items()),
        key=lambda term: term[1],
    )
    return f"{name} takes {format_seconds(more)} more"


def _describe_shortage(found: Plan, room: float) -> Iterator[str]:
    if found.smallest is None:
        yield "No layout is legal on this number of ranks:"
    else:
        demand = found.smallest.demand
        yield f"Nothing fits {room / 1e9:.1f} GB. Least memory: {found.smallest.layout}"
        yield f"takes {demand.low / 1e9:.1f} to {demand.high / 1e9:.1f} GB ({_PEAKS}):"
        yield "  " + ", ".join(f"{name} {num / 1e9:.2f}" for name, num in demand.terms.items()) + " GB"
        if demand.total <= room:
            yield f"The count of {demand.total / 1e9:.1f} GB fits: train a step of it before you rent more."
    yield from (f"  {family}: {why}" for family, why in list(found.fallen.items())[:_MOST_FALLEN])
    if len(found.fallen) > _MOST_FALLEN:
        yield f"  and {len(found.fallen) - _MOST_FALLEN} kinds that need more"


def as_table(found: Plan, calibration: Calibration | None) -> dict[str, Any]:
    """Return the result for machines."""
    rows = []
    for candidate in found.best_by_family:
        bar = find_bar(found, candidate, calibration)
        assert candidate.time is not None
        rows.append(
            {
                "layout": str(candidate.layout),
                "step_s": bar.s,
                "low_s": bar.low_s,
                "high_s": bar.high_s,
                "level": bar.level,
                "terms_s": vars(candidate.time),
                "sent_bytes": find_sent(found, candidate),
                "memory_low_bytes": candidate.demand.low,
                "memory_high_bytes": candidate.demand.high,
                "memory_terms": candidate.demand.terms,
                "remarks": bar.remarks,
            }
        )
    return {
        "cluster": str(found.cluster),
        "remarks": (*found.cluster.remarks, *found.costs.remarks),
        "ranks": found.cluster.num_ranks,
        "legal": found.num_legal,
        "fitting": rows,
        "ties": [str(candidate.layout) for candidate in found.ties],
        "smallest": None if found.smallest is None else str(found.smallest.layout),
        "smallest_bytes": None if found.smallest is None else found.smallest.demand.high,
        "fallen": found.fallen,
    }


def _scale(costs: ModelCosts, rules: Rules, cluster: Cluster, fit: Constants, limit: float | None) -> int:
    """Print a line for each halving of the nodes, and return 0 if one of them fits."""
    from paceline.plan.search import search

    rows = [("ranks", "step", "rank-hours per 1e9 tokens or samples", "layout")]
    for nodes in [cluster.nodes >> n for n in range(cluster.nodes.bit_length()) if not cluster.nodes % 2**n]:
        found = search(costs, rules, replace(cluster, nodes=nodes), fit, limit=limit)
        ranks = str(found.cluster.num_ranks)
        if not found.fitting:
            rows.insert(1, (ranks, "-", "-", "nothing fits"))
            continue
        best = found.fitting[0]
        hours = best.seconds * found.cluster.num_ranks / (costs.global_batch * costs.tokens) * 1e9 / 3600
        rows.insert(1, (ranks, format_seconds(best.seconds), f"{hours:.3g}", str(best.layout)))
    print(format_rows(rows))
    return int(all(row[-1] == "nothing fits" for row in rows[1:]))
