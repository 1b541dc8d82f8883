"""`paceline train RECIPE.toml`: trains a recipe, the main command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.grace import add_grace_flag, announce_grace
from paceline.cli.output import add_recipe_flags
from paceline.cli.profiling import (
    add_profile_flags,
    describe_recording,
    print_recording,
    refuse_recording,
    request_recording,
)
from paceline.cli.watching import add_watching_flags, build_watcher, print_remark

if TYPE_CHECKING:
    from paceline.recipe import Layout, Recipe, Settled

# Ranks of this machine may take so long to save and leave.
_STOP_S = 60.0
_DESCRIPTION = """
Trains a recipe. If the run's folder holds an unfinished run of this recipe, goes on from its newest
checkpoint; Ctrl-C or SIGTERM saves first. Started by torchrun or srun, it joins their ranks. On several
nodes, `paceline run --nnodes N ... -m paceline train RECIPE` starts them.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "train", help="train a recipe on one or many ranks", description=_DESCRIPTION
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a .toml file, for example recipes/gpt-stdlib.toml")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks to start on this machine (default: the product of the layout's degrees)",
    )
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/<name of the recipe>)")
    add_recipe_flags(parser, "train.steps=100")
    parser.add_argument(
        "--accept",
        action="extend",
        type=_split_keys,
        default=[],
        metavar="KEY[,KEY]",
        help="keys or sections of the recipe that may differ from those of the run in --out, for example "
        "optimizer.lr or data; the run goes on with the new values",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="take one step, evaluate one batch and save, then remove the folder; no sink gets anything",
    )
    parser.add_argument(
        "--replay-updates",
        metavar="FILE",
        help="updates.jsonl of an asynchronous run, to apply the same updates again on any number of ranks",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print every key of the recipe, not only those that were set"
    )
    add_grace_flag(parser)
    add_watching_flags(parser)
    add_profile_flags(parser)
    parser.set_defaults(run=run)


def _split_keys(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()]


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.data import prepare_data
    from paceline.place import is_launched
    from paceline.recipe import dump_recipe, load_recipe
    from paceline.train.state.run_folder import check_run_folder

    remarks: list[str] = []
    sinks = ["metrics.sinks=[]"] * args.dry_run
    recipe = load_recipe(args.recipe, [*args.set, *sinks], remark=remarks.append)
    folder = Path(args.out) if args.out else Path("runs") / Path(args.recipe).stem
    if args.dry_run:
        folder = folder.with_name(f"{folder.name}.dry-run")
    announce_grace(args)
    if is_launched(os.environ):
        _refuse_launcher_flags(args)
        refuse_recording(args)
        return _join(recipe, remarks, folder, args)
    nproc, layout, layout_remarks = _choose_ranks(args.nproc, recipe)

    from paceline.cli.preflight import check_memory
    from paceline.launching.local import check_launch, launch, warm_up

    watcher = build_watcher(args, request_recording(args))
    warm_up()  # It imports torch while the folder and the data are checked here.
    if args.dry_run:
        shutil.rmtree(folder, ignore_errors=True)
    check_run_folder(folder, recipe, args.accept)
    prepare_data(recipe)
    check_launch(nproc)
    check_memory(recipe, [layout])
    for remark in (*remarks, *layout_remarks):
        print_remark(remark)
    if not args.json:
        from paceline.cli.run_report import describe_recipe

        print(describe_recipe(recipe, args.recipe, folder, layout, verbose=args.verbose), flush=True)
    try:
        results = launch(
            train_on_rank,
            nproc,
            args=(
                *(dump_recipe(recipe), str(folder), not args.json, os.getpid(), tuple(args.accept)),
                *(args.dry_run, args.replay_updates),
            ),
            log_dir=None if args.dry_run else folder / "logs",
            stop_timeout_s=_STOP_S if args.grace_s is None else args.grace_s,
            hang_after_s=None,
            watcher=watcher,
        )
    except BaseException:
        print_recording(args, has_failed=True)
        for log in (folder / "logs").glob("rank-*.log"):  # a refusal on the ranks leaves nothing
            if not log.stat().st_size:
                log.unlink()
        raise
    return _report(results[0], args)


def train_on_rank(
    recipe_toml: str,
    folder: str,
    shows_progress: bool,
    launcher_pid: int | None = None,
    accept: Sequence[str] = (),
    is_dry: bool = False,
    updates: str | None = None,
) -> dict[str, Any] | None:
    """Train on this rank, and return the summary on rank 0, else `None`.

    If `is_dry`, nothing of `folder` stays. `updates` is a record to replay.
    """
    import tomllib
    from dataclasses import asdict

    from paceline.cli.progress import ProgressPrinter, log_to_stderr
    from paceline.recipe import parse_recipe
    from paceline.train.run import train_recipe
    from paceline.train.stopping import Stopped
    from paceline.world import start

    recipe = parse_recipe(tomllib.loads(recipe_toml))
    section = recipe.train
    with (
        ExitStack() as at_end,
        start(
            device=section.device,
            timeout_s=section.timeout_s,
            seed=section.seed,
            threads_per_rank=section.threads_per_rank,
            deterministic=section.deterministic,
        ) as world,
    ):
        log_to_stderr(world)
        progress = ProgressPrinter() if shows_progress and world.is_main else None
        if is_dry and world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            summary = train_recipe(
                *(recipe, Path(folder), world, progress),
                accept=accept,
                launcher_pid=launcher_pid,
                is_dry=is_dry,
                updates=None if updates is None else Path(updates),
            )
        except Stopped as stopped:
            if world.is_main:
                print(f"{stopped}. The same command continues from there.", file=sys.stderr, flush=True)
            raise
    return None if summary is None else asdict(summary)


def _join(recipe: Recipe, remarks: list[str], folder: Path, args: argparse.Namespace) -> int:
    """Train as one of the ranks that torchrun, srun or mpirun started."""
    from paceline.errors import PacelineError
    from paceline.place import read_environment
    from paceline.recipe import dump_recipe

    place = read_environment(os.environ)
    try:
        settled = _settle(recipe, place.world_size)
        for remark in [*remarks, *settled.remarks] if place.rank == 0 else ():
            print_remark(str(remark))
        summary = train_on_rank(
            dump_recipe(recipe),
            str(folder),
            not args.json,
            accept=tuple(args.accept),
            is_dry=args.dry_run,
            updates=args.replay_updates,
        )
    except PacelineError as error:
        if error.on_every_rank and place.rank != 0:
            return error.exit_code  # Rank 0 reports it.
        raise
    return 0 if summary is None else _report(summary, args)


def _settle(recipe: Recipe, world_size: int) -> Settled:
    """Choose the layout; raise on every rank alike if none is legal on these ranks."""
    from paceline.errors import PacelineError
    from paceline.recipe import settle_recipe

    try:
        return settle_recipe(recipe, world_size)
    except PacelineError as error:
        error.on_every_rank = True
        raise


def _report(summary: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        print(
            json.dumps(summary | ({} if args.profile is None else {"profile": describe_recording(args)[1]}))
        )
        return 0
    from paceline.cli.run_report import describe_summary

    print(describe_summary(summary))
    if args.dry_run:
        print_remark("this was a dry run of one step; nothing of it is kept.")
    if args.profile is not None:
        print(f"\n{describe_recording(args)[0]}")
    return 0


def _choose_ranks(asked: int | None, recipe: Recipe) -> tuple[int, Layout, list[str]]:
    """Return the number of ranks to start, their legal layout, and remarks."""
    from paceline.recipe import settle_recipe

    layout = recipe.layout.to_layout()
    if asked is not None and asked < 1:  # The code that starts ranks reports it.
        return asked, layout.close(), []
    nproc = layout.fewest_ranks if asked is None else asked
    settled = settle_recipe(recipe, nproc)
    return nproc, settled.layout, [str(remark) for remark in settled.remarks]


def _refuse_launcher_flags(args: argparse.Namespace) -> None:
    from paceline.errors import PacelineError

    if args.nproc is not None:
        raise PacelineError(
            "PL601",
            saw=f"--nproc {args.nproc} under torchrun, srun or mpirun.",
            rule="The ranks already exist; this process is one of them.",
            fix="Leave --nproc out, or start `paceline train` by itself. In numbered pods, write "
            "`paceline run --nproc-per-node N -m paceline train RECIPE`.",
        )
