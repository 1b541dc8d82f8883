"""`paceline bench`: prints measured tables of throughput, and of what communication costs."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench_collectives import add_collectives
from paceline.cli.command_words import pass_on
from paceline.cli.lint import lint_beside
from paceline.cli.output import add_recipe_flags
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.starts import Measured

# Everything that needs torch is imported where it is used, so that `paceline --help` answers at once.

_MAX_DEFAULT_RANKS = 8


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench` and its benchmarks to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measured tables and plots: scaling, overhead, buckets, dp, collectives",
        description="Measures the training steps of a script or recipe on ranks of this machine, or "
        "collectives on any ranks. Ranks end once they are measured, and no run's folder is written to.",
    )
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    scaling = _add(
        kinds,
        "scaling",
        "throughput, speed-up and efficiency on 1, 2, 4 ... ranks",
        "Throughput on 1, 2, 4 ... N ranks, with speed-up and efficiency against the fewest, and why it is "
        "not higher. All ranks have the same number of threads (a recipe's train.threads_per_rank, or cores "
        "/ N), so one rank does not use the whole machine. A recipe's global batch is shared out (strong "
        "scaling), or grows with the ranks (--weak); a script decides by itself.",
        steps=20,
        repeats=3,
    )
    scaling.add_argument("--ranks", metavar="N,N,...", help="numbers of ranks, instead of 1, 2, 4 ... N")
    scaling.add_argument(
        "--weak", action="store_true", help="a recipe's global batch grows with the ranks: times N on N ranks"
    )
    _add(
        kinds,
        "overhead",
        "whole steps against compute alone: the share of communication",
        "Blocks of whole steps and of the same steps without sums of gradients alternate in one run; their "
        "difference is the share of communication.",
        steps=5,
        repeats=10,
    )
    buckets = _add(
        kinds,
        "buckets",
        "the best size for the buckets in which DDP sums gradients",
        "Starts with buckets of several sizes take turns. Each size is compared with the job's own.",
        steps=20,
        repeats=6,
    )
    buckets.add_argument(
        "--sizes",
        metavar="MIB,MIB,...",
        help="sizes to try, in MiB (default 1,5,10,25,50,100); the job's own is always among them",
    )
    _add(
        kinds,
        "dp",
        "threads of one process, as in nn.DataParallel, against ranks",
        "A process whose threads divide each batch, and ranks with the same global batch, take turns: "
        "throughput, cores in use, memory of a process, and bytes through the first replica. On CPU "
        "nn.DataParallel does nothing, so its steps are done by threads of Paceline.",
        steps=20,
        repeats=6,
    )
    add_collectives(kinds)


def _add(kinds: Any, name: str, text: str, description: str, *, steps: int, repeats: int) -> Any:
    parser = kinds.add_parser(name, help=text, description=description)
    parser.add_argument(
        "target", metavar="SCRIPT|RECIPE", help="a script for ranks, as for `paceline run`, or a recipe"
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORDS", help="the script's arguments; after --, any: -- --epochs 3"
    )
    pass_on(parser, "words")
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=int,
        help=f"(most) ranks; default: one per GPU or core, 2 to {_MAX_DEFAULT_RANKS}",
    )
    block = "per block" if name == "overhead" else "per start"
    again = "pairs of blocks" if name == "overhead" else "starts of each way"
    parser.add_argument(
        "--steps", metavar="K", type=int, default=steps, help=f"measured steps {block} (default {steps})"
    )
    parser.add_argument(
        "--repeats", metavar="R", type=int, default=repeats, help=f"{again} (default {repeats})"
    )
    add_recipe_flags(parser, "model.layers=2")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `paceline bench BENCHMARK`, and return 0."""
    from paceline.bench.starts import Measured
    from paceline.recipe import load_recipe

    if Path(args.target).suffix == ".py":
        job = Measured(words=(args.target, *args.words))
        _check_script(args)
    else:
        if args.words:
            raise PacelineError(
                "PL601",
                saw=f"{' '.join(args.words)} after a recipe.",
                rule="Only a script has arguments; a recipe has keys.",
                fix="Change keys of the recipe by --set.",
            )
        job = Measured(recipe=load_recipe(args.target, args.set))
    return _scaling(job, args) if args.bench == "scaling" else _measure(job, args)


def _check_script(args: argparse.Namespace) -> None:
    """Refuse what only a recipe has, and report the mistakes that the script itself shows."""
    from paceline.launching.rank.script import Script, check_script

    flags = ["--set"] if args.set else []
    flags += ["--weak"] if getattr(args, "weak", False) else []
    for flag in flags:
        raise PacelineError(
            "PL601",
            saw=f"{flag} with a script.",
            rule="It changes a recipe; a script has settings of its own.",
            fix=f"Leave {flag} out, or pass arguments to the script: -- --batch-size 8.",
        )
    check_script(Script(args.target, ()))
    if (linter := lint_beside(args.target, as_json=args.json, one_node=True, advice=False)) is not None:
        linter.join()  # before anything is timed


def _scaling(job: Measured, args: argparse.Namespace) -> int:
    from paceline.bench.scaling import list_ranks, measure_scaling
    from paceline.cli.bench_report import describe_scaling

    if args.ranks is None:
        ranks = list_ranks(_count_ranks(job, args))
    else:
        ranks = _parse_ranks(args.ranks, args.nproc)
    _print_note(
        f"measuring on {', '.join(map(str, ranks))} ranks, {args.repeats} x {args.steps} steps each ..."
    )
    scaling = measure_scaling(job, ranks, steps=args.steps, repeats=args.repeats, weak=args.weak)
    print(json.dumps(asdict(scaling)) if args.json else describe_scaling(scaling))
    return 0


def _measure(job: Measured, args: argparse.Namespace) -> int:
    from paceline.bench import variants
    from paceline.cli import bench_report as report

    measure, describe = {
        "overhead": (variants.measure_overhead, report.describe_overhead),
        "buckets": (variants.measure_buckets, report.describe_buckets),
        "dp": (variants.measure_dp, report.describe_dp),
    }[args.bench]
    num_ranks = _count_ranks(job, args)
    more: dict[str, Any] = {}
    if getattr(args, "sizes", None) is not None:
        more["sizes"] = parse_sizes(args.sizes)
    _print_note(f"measuring on {num_ranks} ranks, {args.repeats} x {args.steps} steps each ...")
    found = measure(job, num_ranks, **more, steps=args.steps, repeats=args.repeats)
    print(json.dumps(asdict(found)) if args.json else describe(found))
    return 0


def parse_sizes(text: str) -> list[float]:
    """Return the sizes of buckets of `5,25,100`, in MiB; raise PL620."""
    with suppress(ValueError):
        sizes = [float(word) for word in text.split(",")]
        if all(0 < size < float("inf") for size in sizes):
            return sizes
    raise PacelineError(
        "PL620",
        saw=f"--sizes {text}.",
        rule="--sizes is a comma-separated list of positive sizes of buckets in MiB.",
        fix="Write for example --sizes 5,25,100.",
    )


def _parse_ranks(text: str, nproc: int | None) -> list[int]:
    numbers = [word.strip() for word in text.split(",")]
    if nproc is not None or not all(word.isdecimal() for word in numbers):
        saw = f"--ranks {text}" + ("." if nproc is None else f" with --nproc {nproc}.")
        raise PacelineError(
            "PL620",
            saw=saw,
            rule="--ranks is a comma-separated list of numbers of ranks; --nproc N means 1, 2, 4 ... N.",
            fix="Write for example --ranks 1,2,4, and leave --nproc out.",
        )
    return sorted({int(word) for word in numbers})


def _count_ranks(job: Measured, args: argparse.Namespace) -> int:
    if args.nproc is not None:
        return int(args.nproc)
    import torch

    from paceline.place import usable_cores

    gpus = torch.cuda.device_count() if job.device != "cpu" else 0
    return max(2, min(_MAX_DEFAULT_RANKS, gpus if gpus > 1 else usable_cores()))


def _print_note(text: str) -> None:
    print(text, file=sys.stderr)
