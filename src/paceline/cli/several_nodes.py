"""Trains a recipe on several nodes: `paceline train --nnodes` is `paceline run -m paceline train` on each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.watching import print_remark
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.schedulers.target import Nodes

_MAX_RESTARTS = 3


def add_membership_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of nodes that may be lost or leave."""
    parser.add_argument(
        "--detect-s",
        type=float,
        metavar="S",
        help="seconds without a beat after which a node is lost (default 3); other waits are derived from it",
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        metavar="S",
        help="seconds to wait for nodes that are missing (default 600)",
    )


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--nnodes` and the flags that need it."""
    nodes = parser.add_argument_group("several nodes", "The same command runs on each of them.")
    nodes.add_argument(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="number of nodes; with a range, the run goes on when nodes join, leave or are lost",
    )
    nodes.add_argument(
        "--rdzv-backend",
        choices=["c10d", "etcd", "folder"],
        help="what holds the state of the job: a launcher, an etcd, or a folder of all nodes (default: the "
        "run's folder if it is on a network's file system, else c10d)",
    )
    nodes.add_argument(
        "--rdzv-endpoint",
        metavar="PLACE",
        help="where the nodes meet, the same on all of them: HOST[:PORT] of a node or an etcd, or the folder",
    )
    nodes.add_argument(
        "--rdzv-id", metavar="ID", help="the run's name where they meet (default: the name of the recipe)"
    )
    add_membership_flags(nodes)
    nodes.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"number of times that failed ranks are started again (default {_MAX_RESTARTS})",
    )


def refuse_node_flags(args: argparse.Namespace) -> None:
    """Raise PL607 for flags of several nodes without `--nnodes`."""
    for flag in ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts", "detect_s", "join_timeout"):
        value = getattr(args, flag)
        if value is not None:
            raise PacelineError(
                "PL607",
                saw=f"--{flag.replace('_', '-')} {value} without --nnodes.",
                rule="It belongs to a run on several nodes.",
                fix="Add --nnodes 2, or a range such as --nnodes 1:4, or leave it out.",
            )


def train_on_nodes(args: argparse.Namespace, recipe: Recipe) -> int:
    """Start this node's ranks, which meet those of the other nodes; does not return if they were started.

    Raises:
        PacelineError: PL365 for an invalid number of nodes, PL607 without `--rdzv-endpoint`, and whatever
            keeps the recipe from training on one of these numbers of nodes.
    """
    from paceline.cli.main import build_parser
    from paceline.schedulers.target import read_nodes

    nodes, nproc = read_nodes(args.nnodes, "--nnodes"), 1 if args.nproc is None else args.nproc
    meeting = _choose_meeting(args) if nodes.most > 1 else []
    if nproc > 0:
        check_layouts(recipe, nodes, nproc, "--nnodes")
    words = [
        "run",
        "--nnodes",
        args.nnodes,
        "--nproc-per-node",
        str(nproc),
        "--hang-after",
        str(args.hang_after),
    ]
    if nodes.most > 1:
        name = args.rdzv_id or Path(args.recipe).stem
        words += [*meeting, "--rdzv-id", name]
    words += ["--max-restarts", str(_MAX_RESTARTS if args.max_restarts is None else args.max_restarts)]
    waits = ("grace_s", "detect_s", "join_timeout")
    for flag in (*waits, "profile", "profile_after", "profile_steps"):
        value = getattr(args, flag)
        words += [] if value is None else [_spell(flag), str(value)]
    words += [_spell(flag) for flag in ("keep_alive", "advice", "no_watch", "json") if getattr(args, flag)]
    words += ["-m", "paceline", "train", args.recipe, *(["--out", args.out] if args.out else [])]
    words += [word for setting in args.set for word in ("--set", setting)]
    words += [word for key in args.accept for word in ("--accept", key)]
    words += ["--json"] * args.json + ["--dry-run"] * args.dry_run
    launch = build_parser().parse_args(words)
    return int(launch.run(launch))


def _choose_meeting(args: argparse.Namespace) -> list[str]:
    """Return the flags for the place where the nodes meet."""
    from paceline.launching.members.common_disk import find_network_disk

    folder = Path(args.out) if args.out else Path("runs") / Path(args.recipe).stem
    disk = find_network_disk(folder)
    if disk is not None and args.rdzv_backend is None and args.rdzv_endpoint is None:
        print_remark(f"the nodes meet in the run's folder, which is on a file system of the network ({disk})")
        return ["--rdzv-backend", "folder", "--rdzv-endpoint", str(folder / ".rendezvous")]
    if args.rdzv_endpoint is None:
        raise PacelineError(
            "PL607",
            saw=f"--nnodes {args.nnodes} without --rdzv-endpoint, and {folder} is not known to be common.",
            rule="The nodes meet at one of them, in an etcd or in a folder that all of them see.",
            fix="Add --rdzv-endpoint HOST with the name or address of the first node, on every node; or "
            "--rdzv-backend folder --rdzv-endpoint FOLDER.",
        )
    return ["--rdzv-backend", args.rdzv_backend or "c10d", "--rdzv-endpoint", args.rdzv_endpoint]


def check_layouts(recipe: Recipe, nodes: Nodes, nproc: int, flag: str) -> None:
    """Refuse a recipe that has no legal layout on some number of nodes.

    Args:
        recipe: the recipe.
        nodes: all numbers of nodes that the job may have.
        nproc: ranks of each node.
        flag: names `nodes` in messages.
    """
    from paceline.recipe import settle_recipe

    for num_nodes in range(nodes.least, nodes.most + 1):
        try:
            settle_recipe(recipe, num_nodes * nproc)
        except PacelineError:
            if nodes.is_range:
                print_remark(
                    f"{flag} {nodes} allows {_count(num_nodes, 'node')} with {_count(nproc, 'rank')} each, "
                    'which the layout does not fit: use "auto" for dp_replicate or dp_shard, list '
                    "[elastic] layouts, or choose another range."
                )
            raise


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _spell(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"
