"""`paceline bench`: prints measured tables of throughput, and of what communication costs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench_collectives import add_collectives
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.recipe import Recipe

# Everything that needs torch is imported where it is used, so that `paceline --help` answers at once.

_MAX_DEFAULT_RANKS = 8


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench` and its benchmarks to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measured tables and plots: scaling, overhead, buckets, collectives",
        description="Measures a recipe's training steps on ranks of this machine, or collectives on any "
        "ranks. Nothing is written into run folders.",
    )
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    scaling = _add(
        kinds,
        "scaling",
        "throughput, speed-up and efficiency on 1, 2, 4 ... ranks",
        "Throughput on 1, 2, 4 ... N ranks, with speed-up and efficiency against the fewest. All ranks have "
        "the same number of threads (train.threads_per_rank, or cores / N), so one rank does not use the "
        "whole machine. By default the recipe's global batch is shared out (strong scaling); with --weak it "
        "grows with the ranks.",
        steps=20,
        repeats=3,
    )
    scaling.add_argument("--ranks", metavar="N,N,...", help="numbers of ranks, instead of 1, 2, 4 ... N")
    scaling.add_argument(
        "--weak", action="store_true", help="the global batch grows with the ranks: times N on N ranks"
    )
    scaling.add_argument("--plot", metavar="FILE", type=Path, help="also draw a .png, .svg or .pdf")
    _add(
        kinds,
        "overhead",
        "whole steps against compute alone: the share of communication",
        "Blocks of whole steps and of the same steps without communication alternate in one run; their "
        "difference is the share of communication.",
        steps=5,
        repeats=10,
    )
    buckets = _add(
        kinds,
        "buckets",
        "the best size for the buckets in which gradients are summed",
        "Blocks of steps with buckets of several sizes alternate in one run. Each size is compared with the "
        "recipe's ddp.bucket_cap_mb.",
        steps=5,
        repeats=10,
    )
    buckets.add_argument(
        "--sizes",
        metavar="MIB,MIB,...",
        help="sizes to try, in MiB (default 1,5,10,25,50,100); the recipe's own is always among them",
    )
    add_collectives(kinds)


def _add(kinds: Any, name: str, text: str, description: str, *, steps: int, repeats: int) -> Any:
    parser = kinds.add_parser(name, help=text, description=description)
    parser.add_argument("recipe", metavar="RECIPE", help="path of a recipe's .toml file")
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=int,
        help=f"(most) ranks; default: one per GPU or core, 2 to {_MAX_DEFAULT_RANKS}",
    )
    block = "per launch" if name == "scaling" else "per block"
    again = "launches of each number of ranks" if name == "scaling" else "pairs of blocks"
    parser.add_argument(
        "--steps", metavar="K", type=int, default=steps, help=f"measured steps {block} (default {steps})"
    )
    parser.add_argument(
        "--repeats", metavar="R", type=int, default=repeats, help=f"{again} (default {repeats})"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        action="append",
        default=[],
        help="overrides a key of the recipe, for example model.layers=2; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `paceline bench BENCHMARK`, and return 0.

    Raises:
        PacelineError: for a recipe, numbers or a machine that do not allow it.
    """
    from paceline.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.settings)
    kinds = {
        "scaling": _scaling,
        "overhead": _overhead,
        "buckets": _buckets,
    }
    return kinds[args.bench](recipe, args)


def _scaling(recipe: Recipe, args: argparse.Namespace) -> int:
    from paceline.bench.picture import check_picture, draw_scaling
    from paceline.bench.scaling import list_ranks, measure_scaling
    from paceline.cli.bench_report import describe_scaling

    if args.plot is not None:
        check_picture(args.plot)
    if args.ranks is None:
        ranks = list_ranks(_default_ranks(recipe) if args.nproc is None else args.nproc)
    else:
        ranks = _parse_ranks(args.ranks, args.nproc)
    _print_note(
        f"measuring on {', '.join(map(str, ranks))} ranks, {args.repeats} x {args.steps} steps each ..."
    )
    scaling = measure_scaling(recipe, ranks, steps=args.steps, repeats=args.repeats, weak=args.weak)
    print(json.dumps(asdict(scaling)) if args.json else describe_scaling(scaling))
    if args.plot is not None:
        draw_scaling(scaling, args.plot)
        _print_note(f"drawn into {args.plot}")
    return 0


def _overhead(recipe: Recipe, args: argparse.Namespace) -> int:
    from paceline.bench.overhead import measure_overhead
    from paceline.cli.bench_report import describe_overhead

    num_ranks = _default_ranks(recipe) if args.nproc is None else args.nproc
    _print_note(f"measuring on {num_ranks} ranks, {args.repeats} pairs of blocks of {args.steps} steps ...")
    overhead = measure_overhead(recipe, num_ranks, steps=args.steps, repeats=args.repeats)
    print(json.dumps(asdict(overhead)) if args.json else describe_overhead(overhead))
    return 0


def _buckets(recipe: Recipe, args: argparse.Namespace) -> int:
    from paceline.bench.buckets import DEFAULT_SIZES, measure_buckets
    from paceline.cli.bench_report import describe_buckets

    sizes = DEFAULT_SIZES if args.sizes is None else _parse_sizes(args.sizes)
    num_ranks = _default_ranks(recipe) if args.nproc is None else args.nproc
    _print_note(
        f"measuring on {num_ranks} ranks, {args.repeats} blocks of {args.steps} steps of each size ..."
    )
    found = measure_buckets(recipe, num_ranks, sizes, steps=args.steps, repeats=args.repeats)
    print(json.dumps(asdict(found)) if args.json else describe_buckets(found))
    return 0


def _parse_sizes(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise PacelineError(
            "PL965",
            saw=f"--sizes {text}.",
            rule="--sizes is a comma-separated list of sizes of buckets in MiB.",
            fix="Write for example --sizes 5,25,100.",
        ) from None


def _parse_ranks(text: str, nproc: int | None) -> list[int]:
    numbers = [word.strip() for word in text.split(",")]
    if nproc is not None or not all(word.isdecimal() for word in numbers):
        saw = f"--ranks {text}" + ("." if nproc is None else f" with --nproc {nproc}.")
        raise PacelineError(
            "PL626",
            saw=saw,
            rule="--ranks is a comma-separated list of numbers of ranks; --nproc N means 1, 2, 4 ... N.",
            fix="Write for example --ranks 1,2,4, and leave --nproc out.",
        )
    return sorted({int(word) for word in numbers})


def _default_ranks(recipe: Recipe) -> int:
    import torch

    from paceline.place import usable_cores

    gpus = torch.cuda.device_count() if recipe.train.device != "cpu" else 0
    return max(2, min(_MAX_DEFAULT_RANKS, gpus if gpus > 1 else usable_cores()))


def _print_note(text: str) -> None:
    print(text, file=sys.stderr)
