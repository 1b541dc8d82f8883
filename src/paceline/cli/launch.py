"""`paceline launch slurm|kubernetes|ssh RECIPE|SCRIPT`: renders a job for several nodes, and submits it."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from paceline.cli.watching import print_remark
from paceline.errors import PacelineError
from paceline.schedulers.kubernetes import KubernetesJob, render_kubernetes
from paceline.schedulers.slurm import SlurmJob, render_slurm
from paceline.schedulers.ssh import SshJob, read_hosts, render_ssh
from paceline.schedulers.submit import submit, write_rendered
from paceline.schedulers.target import (
    MARK,
    ClusterJob,
    Nodes,
    Target,
    add_flags,
    check_target,
    read_flags,
    read_nodes,
)

_DESCRIPTION = """
Renders a job for a cluster as a file that a person can read. Each node starts `paceline run`, ranks save
before the job ends, and a job that is stopped before its end starts again. Without --submit, prints the file.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "launch", help="render a job for SLURM, Kubernetes or nodes with ssh", description=_DESCRIPTION
    )
    kinds = parser.add_subparsers(title="clusters", metavar="CLUSTER", dest="cluster", required=True)
    slurm = kinds.add_parser("slurm", help="a batch script", description=_DESCRIPTION)
    _add_flags(slurm, SlurmJob)
    slurm.set_defaults(run=run_slurm)
    kubernetes = kinds.add_parser("kubernetes", help="a Job with a pod per node", description=_DESCRIPTION)
    _add_flags(kubernetes, KubernetesJob)
    kubernetes.set_defaults(run=run_kubernetes)
    ssh = kinds.add_parser("ssh", help="a bash script for nodes that ssh reaches", description=_DESCRIPTION)
    _add_flags(ssh, SshJob)
    ssh.set_defaults(run=run_ssh)


def _add_flags(parser: argparse.ArgumentParser, kind: type[ClusterJob | SshJob]) -> None:
    if kind is not SshJob:
        parser.add_argument("--nodes", required=True, metavar="N|MIN:MAX", help="number of nodes, or a range")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks per node (default: its GPUs, or 1)"
    )
    parser.add_argument("--name", metavar="NAME", help="the job's name (default: that of the file)")
    add_flags(parser, kind)
    parser.add_argument("--file", metavar="FILE", help="write the rendered job there (default: print it)")
    parser.add_argument("--submit", action="store_true", help="write the file and submit it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("target", metavar="RECIPE|SCRIPT", help="a recipe (.toml) or a Python script")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="go to `paceline train` or the script"
    )


def run_slurm(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    target, nodes, nproc = _read_job(args)
    job = SlurmJob(
        target=target,
        nodes=nodes,
        nproc_per_node=nproc,
        name=args.name or target.name,
        **read_flags(args, SlurmJob),
    )
    return _deliver(args, render_slurm(job), f"{job.name}.sbatch", "sbatch", ["--parsable"])


def run_kubernetes(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    target, nodes, nproc = _read_job(args)
    job = KubernetesJob(
        target=target,
        nodes=nodes,
        nproc_per_node=nproc,
        name=args.name or re.sub("[^a-z0-9]+", "-", target.name.lower()).strip("-"),
        **read_flags(args, KubernetesJob),
    )
    text = render_kubernetes(job)
    if not job.volumes:
        print_remark(
            "without --volume, all that the pods write stays in their containers and is lost with them, "
            "checkpoints included."
        )
    return _deliver(args, text, f"{job.name}.yaml", "kubectl", ["create", "-f"])


def run_ssh(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code; with `--submit` it becomes the script."""
    hosts, slots = read_hosts(args.hosts)
    args.nodes, args.gpus_per_node = str(len(hosts)), 0
    args.nproc_per_node = slots if args.nproc_per_node is None else args.nproc_per_node
    target, _, nproc = _read_job(args)
    name = args.name or target.name
    job = SshJob(target=target, nproc_per_node=nproc, name=name, **read_flags(args, SshJob))
    text, path = render_ssh(job, hosts), Path(args.file or f"{name}.ssh.sh")
    if args.submit and not args.json:  # it stays in front, as the ranks do
        write_rendered(path, text, MARK)
        os.execvp("bash", ["bash", str(path)])
    return _deliver(args, text, path.name, "bash", [])


def _read_job(args: argparse.Namespace) -> tuple[Target, Nodes, int]:
    """Check what both clusters need: the target, the nodes, the ranks, and a recipe's layout on them."""
    target, nodes = Target(args.target, tuple(args.args)), read_nodes(args.nodes)
    check_target(target)
    nproc = args.nproc_per_node or args.gpus_per_node or 1
    for flag in ("nproc_per_node", "gpus_per_node", "cpus_per_node", "max_requeues"):
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
    from paceline.recipe import load_recipe, settle_recipe

    settings = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    settings.add_argument("--set", action="append", default=[])
    found, _ = settings.parse_known_args(list(target.args))
    recipe = load_recipe(target.path, found.set, remark=lambda remark: None)
    for ranks in range(nodes.least * nproc, nodes.most * nproc + 1, nproc):
        try:
            settle_recipe(recipe, ranks)
        except PacelineError:
            if nodes.is_range:
                print_remark(
                    f"--nodes {nodes} allows {ranks} rank{'s' * (ranks > 1)}, which the layout does not fit: "
                    'use "auto" for dp_replicate or dp_shard, or use another range.'
                )
            raise


def _deliver(args: argparse.Namespace, text: str, name: str, program: str, words: list[str]) -> int:
    """Print the rendered job, or write it and submit it."""
    path = Path(args.file or name) if args.file or args.submit else None
    said = None
    if path is not None:
        write_rendered(path, text, MARK)
        said = submit(program, words, path) if args.submit else None
    if args.json:
        print(json.dumps({"file": None if path is None else str(path), "submitted": said, "text": text}))
    elif path is None:
        print(text, end="")
    else:
        print(f"wrote {path}" + ("" if said is None else f", submitted: {said}"))
    return 0
