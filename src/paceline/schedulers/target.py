"""The target of a job: a recipe or a script, the number of nodes, and the words that each node runs."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.reading import read_file

MARK = "Rendered by `paceline launch"
"""The beginning of the line by which a rendered file is known."""
_MOST_BYTES = 1 << 20
# Where a node may be lost, ranks start again on those that are left; each start counts.
RESTARTS = 3


@dataclass(frozen=True)
class Nodes:
    """The number of nodes of a job.

    Attributes:
        least: fewer do not train.
        most: the number that is requested.
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_range else str(self.most)

    @property
    def is_range(self) -> bool:
        """Whether the job goes on without some of its nodes."""
        return self.least < self.most

    @property
    def restarts(self) -> int:
        """The number of times that ranks start again after a failure."""
        return RESTARTS if self.is_range else 0


def flag(default: Any, metavar: str | None, text: str, **options: Any) -> Any:
    """Return a field of a job that is a flag of `paceline launch`, with its help; `...` is required.

    A flag is named after its field, but for `name` among the options, and lists become tuples.
    """
    settings = {"metavar": metavar, "help": text, "default": default, **options}
    if metavar is None:
        del settings["metavar"]
    if default is ...:
        settings |= {"default": None, "required": True}
        return field(metadata=settings)
    return field(default=() if default == [] else default, metadata=settings)


def add_flags(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add the flags of a kind of job."""
    for each in fields(kind):
        if each.metadata:
            options = dict(each.metadata)
            name = options.pop("name", each.name)
            parser.add_argument(f"--{name.replace('_', '-')}", dest=each.name, **options)


def read_flags(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Return the values of the flags of a kind of job."""
    found = {each.name: getattr(args, each.name) for each in fields(kind) if each.metadata}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job of any cluster: its target, and what all clusters have flags for."""

    target: Target
    nodes: Nodes
    nproc_per_node: int
    name: str
    gpus_per_node: int = flag(0, "N", "GPUs per node (default 0)", type=int)
    cpus_per_node: int | None = flag(
        None, "N", "cores per node (default: the cluster's, or one per rank)", type=int
    )
    mem: str | None = flag(None, "SIZE", "memory of each node or pod, for example 200G, in Kubernetes 200Gi")
    interface: str | None = flag(None, "NAME", "the network interface between nodes, such as ib0")
    grace_s: int = flag(
        120, "S", "seconds that ranks have to save before the job ends (default %(default)s)", type=int
    )
    has_doctor: bool = flag(
        False, None, "check the nodes with `paceline doctor` first, and keep out those that fail",
        name="doctor", action="store_true",
    )  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A recipe or a script with its arguments.

    Attributes:
        path: of the recipe or script, as given.
        args: the words after it.
    """

    path: str
    args: tuple[str, ...] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether `paceline train` runs it."""
        return self.path.endswith(".toml")

    @property
    def name(self) -> str:
        """The job's default name: that of the file."""
        return Path(self.path).stem or "paceline"

    @property
    def words(self) -> tuple[str, ...]:
        """The words that follow the flags of `paceline run`."""
        train = ("-m", "paceline", "train") if self.is_recipe else ()
        return (*train, self.path, *self.args)


def read_nodes(text: str, flag: str = "--nodes") -> Nodes:
    """Read `N` or `MIN:MAX`."""
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if found is not None:
        nodes = Nodes(int(found[1]), int(found[2] or found[1]))
        if 1 <= nodes.least <= nodes.most:
            return nodes
    raise PacelineError(
        "PL365",
        saw=f"{flag} {text}.",
        rule="It is the number of nodes, or MIN:MAX with 1 <= MIN <= MAX.",
        fix=f"Use for example {flag} 2, or {flag} 2:4 for a job that goes on with 2.",
    )


def check_target(target: Target) -> None:
    """Raise PL340 for a target that does not exist, and PL364 for one that is a batch script."""
    file = Path(target.path)
    if not file.is_file():
        raise PacelineError(
            "PL340",
            saw=f"{target.path} is not a file.",
            rule="A job runs a recipe (.toml) or a Python script.",
            fix="Check the path. Put options of `paceline launch` before it, and its own arguments after it.",
        )
    faults = _find_faults(read_file(file, _MOST_BYTES).decode("utf-8", errors="replace"))
    if faults is not None:
        raise PacelineError(
            "PL364",
            saw=f"{target.path} is a batch script for SLURM{faults}.",
            rule="`paceline launch slurm` writes the batch script itself.",
            fix="Name the training script in its place: paceline launch slurm --nodes 4 ... train.py",
        )


def _find_faults(text: str) -> str | None:
    """Return the known mistakes of a batch script, to follow its name; None if it is none."""
    if re.search(r"^#SBATCH\b", text, re.MULTILINE) is None:
        return None
    faults = []
    if re.search(r"^\s*(export\s+)?(RANK|LOCAL_RANK)=\"?\$\{?SLURM_", text, re.MULTILINE):
        faults.append("RANK is set before srun, where SLURM_PROCID is 0, so all tasks are rank 0")
    tasks = re.search(r"^#SBATCH\s+--ntasks-per-node[= ](\d+)", text, re.MULTILINE)
    ranks = re.search(r"--nproc[-_]per[-_]node[= ](\S+)", text)
    if tasks and ranks and int(tasks[1]) > 1:
        faults.append(f"each of {tasks[1]} tasks on a node starts {ranks[1]} ranks")
    if re.search(r"--node[-_]rank[= ]\"?\$\{?SLURM_NODEID", text):
        faults.append("$SLURM_NODEID is replaced before srun starts, so it is 0 on all nodes")
    return "".join(f"; {fault}" for fault in faults)


def quote(words: tuple[str, ...] | list[str]) -> str:
    """Join words for a shell."""
    return " ".join(shlex.quote(word) for word in words)
