"""`paceline launch slurm|kubernetes RECIPE|SCRIPT`: renders a job for a cluster, and submits it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.watching import print_remark
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.schedulers.target import Nodes, Target

_DESCRIPTION = """
Renders a job for a cluster as a file that a person can read. Each node starts `paceline run`, ranks save
before the job ends, and a job that is stopped before its end starts again. Without --submit, prints the file.
"""
_GRACE_S = 120


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "launch", help="render a job for SLURM or Kubernetes", description=_DESCRIPTION
    )
    kinds = parser.add_subparsers(title="clusters", metavar="CLUSTER", dest="cluster", required=True)
    _add_slurm(kinds)
    _add_kubernetes(kinds)


def _add_slurm(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser("slurm", help="a batch script", description=_DESCRIPTION)
    _add_common(parser)
    parser.add_argument("--time", required=True, metavar="T", help="time limit: minutes, H:M:S or D-H:M:S")
    parser.add_argument("--partition", metavar="NAME", help="the partition to run in")
    parser.add_argument("--account", metavar="NAME", help="the account that pays")
    parser.add_argument("--mem", metavar="SIZE", help="memory per node, for example 200G")
    parser.add_argument(
        "--array",
        type=int,
        default=0,
        metavar="N",
        help="a job array of N tasks with one node each, in place of one job; tasks beyond MAX are spares",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="all output (default %%x-%%j.out, for an array %%x-%%A_%%a.out)"
    )
    parser.add_argument(
        "--max-requeues",
        type=int,
        default=100,
        metavar="N",
        help="number of times that the job requeues itself (100)",
    )
    parser.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="shell to run first, such as module load"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="another option of sbatch"
    )
    _add_target(parser)
    parser.set_defaults(run=run_slurm)


def _add_kubernetes(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser("kubernetes", help="a Job, a JobSet or a TrainJob", description=_DESCRIPTION)
    _add_common(parser)
    parser.add_argument(
        "--as",
        dest="kind",
        choices=["job", "jobset", "trainjob"],
        default="jobset",
        help="jobset (default) needs the JobSet controller, trainjob Kubeflow Trainer; job works everywhere",
    )
    parser.add_argument(
        "--image", required=True, metavar="IMAGE", help="container image with Paceline and the code"
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder to run in (default: the image's)")
    parser.add_argument("--mem", metavar="SIZE", help="memory of each pod, for example 200Gi")
    parser.add_argument("--shm", default="8Gi", metavar="SIZE", help="size of /dev/shm (default 8Gi)")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:PATH", help="mount a persistent volume claim"
    )
    parser.add_argument(
        "--user", type=int, default=1000, metavar="UID", help="user that the pods run as (default 1000)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="ttl=SECONDS (default a week), node-selector=KEY=VALUE, toleration=KEY[=VALUE]:EFFECT, "
        "priority-class=NAME, pull-secret=NAME, service-account=NAME, queue=NAME (of Kueue); may be repeated",
    )
    _add_target(parser)
    parser.set_defaults(run=run_kubernetes)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", required=True, metavar="N|MIN:MAX", help="number of nodes, or a range")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks per node (default: its GPUs, or 1)"
    )
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs per node (default 0)")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help="cores per node")
    parser.add_argument("--name", metavar="NAME", help="the job's name (default: that of the file)")
    parser.add_argument(
        "--interface", metavar="NAME", help="the network interface between nodes, such as ib0"
    )
    parser.add_argument(
        "--grace-s",
        type=int,
        default=_GRACE_S,
        metavar="S",
        help=f"seconds that ranks have to save before the job ends (default {_GRACE_S})",
    )
    parser.add_argument(
        "--doctor",
        action="store_true",
        help="check the nodes with `paceline doctor` first, and keep out those that fail",
    )
    parser.add_argument("--file", metavar="FILE", help="write the rendered job there (default: print it)")
    parser.add_argument("--submit", action="store_true", help="write the file and submit it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a recipe (.toml) or a Python script")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="go to `paceline train` or the script"
    )


def run_slurm(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.schedulers.slurm import MARK, SlurmJob, render_slurm

    target, nodes, nproc = _read_job(args)
    job = SlurmJob(
        target=target,
        nodes=nodes,
        nproc_per_node=nproc,
        time=args.time,
        gpus_per_node=args.gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        mem=args.mem,
        partition=args.partition,
        account=args.account,
        name=args.name or target.name,
        output=args.output or ("%x-%A_%a.out" if args.array else "%x-%j.out"),
        array=args.array,
        interface=args.interface,
        has_doctor=args.doctor,
        grace_s=args.grace_s,
        max_requeues=args.max_requeues,
        setup=tuple(args.setup),
        options=tuple(args.option),
    )
    return _deliver(args, render_slurm(job), MARK, f"{job.name}.sbatch", "sbatch", ["--parsable"])


def run_kubernetes(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.schedulers.kubernetes import MARK, KubernetesJob, render_kubernetes

    target, nodes, nproc = _read_job(args)
    job = KubernetesJob(
        kind=args.kind,
        target=target,
        nodes=nodes,
        nproc_per_node=nproc,
        name=args.name or re.sub("[^a-z0-9]+", "-", target.name.lower()).strip("-"),
        image=args.image,
        workdir=args.workdir,
        gpus_per_node=args.gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        mem=args.mem,
        shm=args.shm,
        volumes=tuple(args.volume),
        user=args.user,
        options=tuple(args.option),
        interface=args.interface,
        has_doctor=args.doctor,
        grace_s=args.grace_s,
    )
    text = render_kubernetes(job)
    if not job.volumes:
        print_remark(
            "without --volume, all that the pods write stays in their containers and is lost with them, "
            "checkpoints included."
        )
    return _deliver(args, text, MARK, f"{job.name}.yaml", "kubectl", ["create", "-f"])


def _read_job(args: argparse.Namespace) -> tuple[Target, Nodes, int]:
    """Check what both clusters need: the target, the nodes, the ranks, and a recipe's layout on them."""
    from paceline.schedulers.target import Target, check_target, read_nodes

    target, nodes = Target(args.target, tuple(args.args)), read_nodes(args.nodes)
    check_target(target)
    nproc = args.nproc_per_node or args.gpus_per_node or 1
    for flag in ("nproc_per_node", "gpus_per_node", "cpus_per_node", "max_requeues", "array"):
        value = getattr(args, flag, None)
        if value is not None and value < (1 if flag in ("nproc_per_node", "cpus_per_node") else 0):
            raise PacelineError(
                "PL365",
                saw=f"--{flag.replace('_', '-')} {value}.",
                rule="It is a whole number, of at least 1 for ranks and cores and 0 for the others.",
                fix="Leave it out for the default.",
            )
    if target.is_recipe:
        _check_recipe(target, nodes, nproc)
    return target, nodes, nproc


def _check_recipe(target: Target, nodes: Nodes, nproc: int) -> None:
    """Refuse a recipe that is wrong, or that has no legal layout for every number of nodes."""
    from paceline.cli.several_nodes import check_layouts
    from paceline.recipe import load_recipe

    settings = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    settings.add_argument("--set", action="append", default=[])
    found, _ = settings.parse_known_args(list(target.args))
    recipe = load_recipe(target.path, found.set, remark=lambda remark: None)
    check_layouts(recipe, nodes, nproc, "--nodes")


def _deliver(
    args: argparse.Namespace, text: str, mark: str, name: str, program: str, words: list[str]
) -> int:
    """Print the rendered job, or write it and submit it."""
    from paceline.schedulers.submit import submit, write_rendered

    path = Path(args.file or name) if args.file or args.submit else None
    said = None
    if path is not None:
        write_rendered(path, text, mark)
        said = submit(program, words, path) if args.submit else None
    if args.json:
        print(json.dumps({"file": None if path is None else str(path), "submitted": said, "text": text}))
    elif path is None:
        print(text, end="")
    else:
        print(f"wrote {path}" + ("" if said is None else f", submitted: {said}"))
    return 0
