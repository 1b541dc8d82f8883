"""`paceline verify RECIPE.toml --layout "..."`: compares layouts with one process."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from paceline.cli.output import add_recipe_flags
from paceline.cli.verify_report import Asked
from paceline.cli.watching import print_remark
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.verifying.check import LayoutResult
    from paceline.verifying.subject import Subject

# Everything that needs torch is imported where it is used, so that `paceline --help` answers at once.

_DESCRIPTION = """
Trains a recipe, or a model of your own, for a few steps in one process, and under each layout on ranks of
this machine, on the same global batches. Compares initial weights, loss, every gradient, the global norm,
buffers, weights after each step and the optimizer's state; where something differs, says where it comes from.
Exit code 1 where a layout differs.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "verify", help="compare layouts with one process, and locate differences", description=_DESCRIPTION
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE|FILE.py:FUNCTION",
        help="path of a recipe's .toml file; or a function that returns a dict of model_fn, batch_fn and "
        "loss, as paceline.verify takes them (or MODULE:FUNCTION)",
    )
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        dest="layouts",
        action="append",
        default=[],
        help='for example "dp_replicate=2 tp=2"; may be given several times (default: the recipe\'s)',
    )
    parser.add_argument(
        "--all", action="store_true", help="every legal layout on 1, 2, 4 ... N ranks, N from --nproc"
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="(most) ranks; fills in dp_replicate where a layout lacks it"
    )
    parser.add_argument("--steps", metavar="K", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp64", "fp32", "bf16", "fp16"),
        default="auto",
        help="fp64 separates rounding from faults best; auto (default) is fp64, or fp32 if the model does "
        "not compute in fp64; with [compress] the recipe's own",
    )
    add_recipe_flags(parser, "train.reduction=fast")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0 if all layouts match one process, 1 if one differs, 2 if one cannot be laid out.
    """

    def show(result: LayoutResult) -> None:
        from paceline.cli import verify_report

        print(verify_report.describe_layout(result), file=sys.stderr if args.json else sys.stdout, flush=True)

    is_own = ":" in args.recipe and not args.recipe.endswith(".toml")
    subject, asked = (_read_function if is_own else _read_recipe)(args)
    from paceline.cli import verify_report
    from paceline.verifying.check import launch_ranks, verify_subject

    if not args.json:
        print(verify_report.describe_begin(args.recipe, subject, asked), flush=True)
    may_narrow = args.dtype == "auto"
    verified = verify_subject(subject, asked.layouts, run=launch_ranks, on_result=show, may_narrow=may_narrow)
    print(
        json.dumps(verify_report.as_table(verified, asked))
        if args.json
        else verify_report.describe_end(verified, asked)
    )
    if verified.ok:
        return 0
    return 2 if {result.status for result in verified.results} <= {"ok", "refused"} else 1


def _read_recipe(args: argparse.Namespace) -> tuple[Subject, Asked]:
    from paceline.recipe import load_recipe

    dtype = args.dtype
    if dtype == "auto":
        own = load_recipe(args.recipe, args.set)
        dtype = "fp64" if own.compress.kind == "none" else own.train.dtype
    recipe = load_recipe(args.recipe, [*args.set, f"train.dtype={dtype}"], remark=print_remark)
    asked = choose_layouts(recipe, args)

    from paceline.cli.preflight import check_memory
    from paceline.data import prepare_data
    from paceline.launching.local import check_launch, warm_up
    from paceline.verifying.subject import RecipeSubject

    warm_up()  # It imports torch while the data is checked here.
    check_launch(max(layout.num_ranks for layout in asked.layouts))
    check_memory(recipe, asked.layouts)
    prepare_data(recipe)
    return RecipeSubject(recipe, args.steps), asked


def _read_function(args: argparse.Namespace) -> tuple[Subject, Asked]:
    if args.all or args.set:
        raise _flags_error(
            f"{'--all' if args.all else '--set'} with {args.recipe}.",
            "Which layouts are legal, and what can be set, follows from a recipe.",
        )
    from paceline.recipe import Layout
    from paceline.verifying.named import load_subject

    given = [Layout.parse(text) for text in args.layouts]
    layouts = [each.resolve(args.nproc) if args.nproc else each.close() for each in given]
    subject = load_subject(args.recipe, args.steps, args.dtype).settle_type()
    return subject, Asked(list(dict.fromkeys(layouts)))


def choose_layouts(recipe: Recipe, args: argparse.Namespace) -> Asked:
    """Return the layouts that the command line names."""
    if args.nproc is not None and args.nproc < 1:
        raise _flags_error(f"--nproc {args.nproc}.", "The number of ranks is a whole number of at least 1.")
    if args.all:
        if args.layouts:
            raise _flags_error("--all with --layout.", "--all already includes every legal layout.")
        if args.nproc is None:
            raise _flags_error(
                "--all without --nproc.", "The possible layouts depend on the number of ranks."
            )
        return _list_all(recipe, args.nproc)
    from paceline.recipe import Layout, settle_recipe
    from paceline.recipe.legal import Rules

    if not args.layouts and args.nproc is not None:
        return Asked([settle_recipe(recipe, args.nproc).layout])
    given = [Layout.parse(text) for text in args.layouts] or [recipe.layout.to_layout()]
    layouts = []
    for layout in given:
        ranks = layout.fewest_ranks if args.nproc is None else args.nproc
        Rules.of(recipe).refuse(layout, ranks)
        layouts.append(layout.resolve(ranks))
    return Asked(list(dict.fromkeys(layouts)))


def _list_all(recipe: Recipe, nproc: int) -> Asked:
    from paceline.bench.scaling import list_ranks
    from paceline.recipe.layout import check_ranks
    from paceline.recipe.legal import Rules, list_candidates

    check_ranks(nproc)  # before the smaller numbers are tried
    asked = Asked([])
    for ranks in list_ranks(nproc):
        legal, num_candidates = Rules.of(recipe).enumerate(ranks)
        asked.layouts += legal
        asked.num_candidates += num_candidates
        for layout in list_candidates(ranks, ("none",), ("none",)):
            if layout not in legal:
                asked.refused.append((layout, Rules.of(recipe).check(layout, ranks)))
    return asked


def _flags_error(saw: str, rule: str) -> PacelineError:
    return PacelineError("PL720", saw=saw, rule=rule, fix="Write for example --all --nproc 4.")
