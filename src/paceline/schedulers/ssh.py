"""Renders a job for nodes that ssh reaches, as a bash script: one `paceline run` on each of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.reading import read_file
from paceline.schedulers.target import MARK, Target, flag, quote

_MOST_BYTES = 1 << 20
# Variables that change what a rank does, and that ssh does not pass on. Every user of a node can read the
# command line that passes them, so tokens are not among them.
_PASSED = ("PYTHONPATH", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "CUDA_HOME", "HF_", "WANDB_PROJECT", "MLFLOW_TRACKING_URI")


@dataclass(frozen=True, kw_only=True)
class SshJob:
    """A job on nodes that ssh reaches."""

    target: Target
    nproc_per_node: int
    name: str
    hosts: str = flag(
        ..., "FILE|NODE,NODE",
        "the nodes, or a host file with lines such as `node0 slots=8`; they meet at the first one",
    )  # fmt: skip
    port: int = flag(29400, "N", "of the meeting (default %(default)s)", type=int)
    workdir: str = flag(".", "DIR", "folder to run in, on every node (default: this one)")
    interface: str | None = flag(None, "NAME", "the network interface between nodes, such as ib0")
    grace_s: int = flag(120, "S", "seconds that ranks have to save (default %(default)s)", type=int)
    has_doctor: bool = flag(
        False, None, "check the nodes with `paceline doctor` first", name="doctor", action="store_true"
    )


def read_hosts(text: str) -> tuple[list[str], int | None]:
    """Read a host file, or names with commas between; return the hosts and the ranks of each, if told."""
    lines = text.split(",")
    if Path(text).is_file():
        lines = read_file(Path(text), _MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    hosts, slots = [], set()
    for line in (each.partition("#")[0].strip() for each in lines):
        if not line:
            continue
        found = re.fullmatch(r"([\w.:@\[\]-]+)(?:\s+slots=([1-9]\d{0,4}))?", line)
        if found is None or line.startswith("-") or found[1] in hosts:
            raise _hosts_error(f"the line {line!r} of {text}.")
        hosts.append(found[1])
        slots.add(int(found[2]) if found[2] else None)
    if not hosts or len(slots) > 1:
        raise _hosts_error(f"{text} with {len(hosts)} nodes, and slots {sorted(map(str, slots))}.")
    return hosts, slots.pop()


def _hosts_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL847",
        saw=saw,
        rule="A line names one node, once, with the number of its ranks; all nodes have as many.",
        fix="Write lines such as `node0 slots=8`, or pass --hosts node0,node1.",
    )


def render_ssh(job: SshJob, hosts: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the script.

    Args:
        job: what to run.
        environment: of this process, of which a few variables are passed on.
    """
    meeting = f"{hosts[0].rpartition('@')[2]}:{job.port}"
    passed = [
        f"{key}={value}"
        for key, value in sorted(environment.items())
        if key in _PASSED or (key.startswith(_PASSED_PREFIXES) and not key.endswith("_TOKEN"))
    ]
    if job.interface:
        passed += [f"GLOO_SOCKET_IFNAME={job.interface}", f"NCCL_SOCKET_IFNAME={job.interface}"]
    sizes = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(job.nproc_per_node)]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", job.name]
    start = ["env", "PYTHONUNBUFFERED=1", *passed, sys.executable, "-m", "paceline"]
    run = [*start, "run", *sizes, "--grace-s", str(job.grace_s), *meet, *job.target.words]
    doctor = [*start, "doctor", *sizes, "--rdzv-endpoint", meeting]
    check = f"on_all {quote([quote(doctor)])} || exit\n" if job.has_doctor else ""
    return _SCRIPT.format(
        mark=MARK,
        hosts=quote(list(hosts)),
        folder=quote([quote([str(Path(job.workdir).absolute())])]),
        check=check,
        run=quote([quote(run)]),
    )


# The remote shell's input ends with the connection, or when the script closes its pipe 9. The remote launcher
# is then asked to stop: ranks save, and their last words still arrive.
_SCRIPT = """\
#!/bin/bash
# {mark} ssh`. One launcher per node; if one fails, those of the others end by themselves.
hosts=({hosts})
set -m -o pipefail  # Ctrl-C reaches this script alone
pipe=$(mktemp -u) && mkfifo "$pipe" && exec 9<>"$pipe" && rm "$pipe" || exit
trap 'exec 9>&-; trap "" INT TERM HUP' INT TERM HUP

on_all() {{
  local host process processes=() code=0
  for host in "${{hosts[@]}}"; do
    (exec </dev/fd/9 9>&-
     ssh -o BatchMode=yes "$host" "cd "{folder}" || exit; exec 3<&0; $1 </dev/null 3<&- & run=\\$!
      (cat <&3; kill -TERM \\$run) >/dev/null 2>&1 & wait \\$run; code=\\$?; kill \\$! 2>&-; exit \\$code" \\
      2>&1 | sed -u "s/^/[$host] /") &
    processes+=($!)
  done
  for process in "${{processes[@]}}"; do
    while kill -0 "$process" 2>/dev/null; do wait "$process"; done  # a signal ends a wait, not the job
    wait "$process" || code=$((code ? code : $?))
  done
  return "$code"
}}

{check}on_all {run}
"""
