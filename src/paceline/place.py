"""Reads this process's rank and number of cores from environment variables; without torch."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PacelineError

Launcher = Literal["torchrun", "slurm", "mpi", "single"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GROUP = ("GROUP_RANK", "GROUP_WORLD_SIZE")
# srun numbers its steps from 0; the batch script, the interactive shell and the external step have
# numbers at the top of 32 bits (slurm.h: SLURM_BATCH_SCRIPT 0xfffffffb, SLURM_INTERACTIVE_STEP 0xfffffffa).
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection uses the port by chance.
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
# Kubernetes sets it in every container.
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_GRACE = "PACELINE_GRACE_S"
GIVEN_PORT = "PACELINE_MASTER_PORT"
"""The variable of the port at which the launcher serves the store; a script may set another MASTER_PORT."""


@dataclass(frozen=True)
class RankPlace:
    """A process's place among the ranks, as its launcher set it.

    Attributes:
        launcher: the program that started the ranks.
        rank: 0 to `world_size - 1`.
        world_size: number of ranks.
        local_rank: the rank's number within this node.
        local_world_size: number of ranks on this node.
        node_rank: 0 to `num_nodes - 1`.
        num_nodes: number of nodes.
        master_addr: address where the ranks meet; None in a world of one.
        master_port: the port there; None in a world of one.
        agent_store: whether torchrun's agent hosts the store, rather than rank 0.
        cores_per_rank: number of cores that the launcher assigned to each rank, or `None` if unknown.
    """

    launcher: Launcher
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    cores_per_rank: int | None = None


def read_environment(environ: Mapping[str, str]) -> RankPlace:
    """Read the launcher's variables; torchrun's come first, then srun's, then mpirun's.

    Empty variables count as unset. A SLURM allocation without srun, or with one task, is a plain process.
    """
    env = {name: value.strip() for name, value in environ.items() if value.strip()}
    if "RANK" in env:
        if _in_slurm_step(env) and _slurm_tasks(env) > 1:
            _refuse_exported_rank(env)
            _refuse_many_launchers(env)
        place = _from_torchrun(env)
    elif _in_slurm_step(env):
        place = _from_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        place = _from_mpi(env)
    elif any(name in env for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        raise _half_set(env, _TORCHRUN, "torchrun")
    else:
        place = RankPlace(launcher="single")
    _check(place)
    if place.launcher != "torchrun" and int(env.get("WORLD_SIZE", place.world_size)) != place.world_size:
        raise PacelineError(
            "PL302",
            saw=f"WORLD_SIZE={env['WORLD_SIZE']}, but {place.launcher} started {place.world_size} ranks.",
            rule="All variables that are set must agree.",
            fix="Unset WORLD_SIZE, or set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE too.",
        )
    return place


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, srun or mpirun started this process as one of several ranks.

    Incomplete variables count too. If true, the process joins the others; if false, it is a plain process,
    which may start ranks of its own.
    """
    env = {name: value for name, value in environ.items() if value.strip()}
    if any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return True
    if _in_slurm_step(env):
        return _slurm_tasks(env) > 1
    return "OMPI_COMM_WORLD_RANK" in env and env.get("OMPI_COMM_WORLD_SIZE") != "1"


def drop_rank_variables(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove torchrun's variables of a rank, and return those that were set and not empty."""
    dropped = {name: environ.pop(name, "").strip() for name in (*_TORCHRUN, *_GROUP)}
    return {name: value for name, value in dropped.items() if value}


def note_grace(environ: MutableMapping[str, str], grace_s: float) -> None:
    """Set the variable by which ranks know how long they have to save and leave after a signal."""
    environ[_GRACE] = f"{grace_s:g}"


def read_grace_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds that ranks have to save and leave after a signal; `None` if unknown."""
    with suppress(KeyError, ValueError):
        return float(environ[_GRACE])
    return None


def check_interfaces(environ: Mapping[str, str]) -> None:
    """Raise PL347 if GLOO_SOCKET_IFNAME names an interface that this machine does not have."""
    wished = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    there = [name for _, name in socket.if_nameindex()]
    missing = [name for name in wished if name not in there]
    if missing:
        raise PacelineError(
            "PL347",
            saw=f"GLOO_SOCKET_IFNAME={environ['GLOO_SOCKET_IFNAME']}, and this machine has no interface "
            f"{', '.join(missing)}. It has {', '.join(there) or 'none'}.",
            rule="gloo listens at the address of that interface.",
            fix="Name one of these (ip -brief addr shows their addresses), or unset GLOO_SOCKET_IFNAME.",
        )


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def find_first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: a08 of `"a[08-10,12],b-01"`."""
    first = re.match(r"(?:[^,\[\]]|\[\d+[\d,-]*\])+(?=,|$)", hosts)
    if first is None:
        raise _bad_list(hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


# ---- one function per launcher


def _from_torchrun(env: Mapping[str, str]) -> RankPlace:
    world_size = _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 0
    # A world of one needs no local numbers and no address.
    needed: tuple[str, ...] = ("RANK", "WORLD_SIZE") if world_size == 1 else _TORCHRUN
    if _KUBERNETES in env and not any(name.startswith("LOCAL_") for name in env if name in _TORCHRUN):
        # Kubeflow's PyTorchJob numbers pods. Without a launcher in the pod, its one process is the rank.
        needed = tuple(name for name in needed if not name.startswith("LOCAL_"))
    if any(name not in env for name in needed):
        raise _half_set(env, needed, "torchrun")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    rank = _number(env, "RANK")
    nodes = -(-world_size // max(1, local_world_size))
    return RankPlace(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        node_rank=_number(env, "GROUP_RANK", rank // max(1, local_world_size)),
        num_nodes=_number(env, "GROUP_WORLD_SIZE", nodes),
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and env.get(GIVEN_PORT, env.get("MASTER_PORT")) == env.get("MASTER_PORT"),
    )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process. Batch scripts have SLURM_PROCID too, but are no step."""
    if "SLURM_PROCID" not in env:
        return False
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if step is not None:
        return not (step.isdigit() and int(step) >= _FIRST_RESERVED_STEP)
    return "SLURM_STEP_NODELIST" in env


def _slurm_tasks(env: Mapping[str, str]) -> int:
    # With srun -n2 inside a job of 4 tasks, the step's own number counts.
    return _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))


def _from_slurm(env: Mapping[str, str]) -> RankPlace:
    world_size = _slurm_tasks(env)
    if world_size == 1:
        return RankPlace(launcher="single")
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    if any(name not in env for name in needed):
        raise _half_set(env, needed, "srun")
    node_rank = _number(env, "SLURM_NODEID")
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if hosts is None and "MASTER_ADDR" not in env:
        raise _half_set(env, (*needed, "SLURM_STEP_NODELIST"), "srun")
    num_nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    per_node = _tasks_per_node(env, world_size, num_nodes)
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    return RankPlace(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=per_node[node_rank] if node_rank < len(per_node) else 0,
        node_rank=node_rank,
        num_nodes=len(per_node),
        master_addr=env.get("MASTER_ADDR") or find_first_host(hosts or ""),
        master_port=_port(env) or _derived_port(f"slurm {job}.{step}"),
        cores_per_rank=_number(env, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in env else None,
    )


def _refuse_exported_rank(env: Mapping[str, str]) -> None:
    """Raise PL361 if the batch script exported RANK, which is then 0 in every task.

    A wrapper inside of each task may set complete variables of its own, and a world of one needs no others.
    """
    if "GROUP_RANK" in env or "TORCHELASTIC_RUN_ID" in env or env.get("WORLD_SIZE") == "1":
        return
    is_complete = all(name in env for name in _TORCHRUN)
    if is_complete and (env["RANK"] != "0" or env["SLURM_PROCID"] == "0"):
        return
    raise PacelineError(
        "PL361",
        saw=f"RANK={env['RANK']} in task {env['SLURM_PROCID']} of the {_slurm_tasks(env)} that srun started.",
        rule="A batch script that exports RANK=$SLURM_PROCID gives every task RANK=0, as SLURM_PROCID is 0 "
        "there; srun sets it later, for each task.",
        fix="Remove the exports of RANK, LOCAL_RANK and WORLD_SIZE from the batch script.",
    )


def _refuse_many_launchers(env: Mapping[str, str]) -> None:
    """Raise PL362 if several tasks of this node are launchers of one job, and each starts all its ranks."""
    if "TORCHELASTIC_RUN_ID" not in env or "SLURM_NODEID" not in env:
        return
    tasks, launchers = _slurm_tasks(env), _number(env, "GROUP_WORLD_SIZE", 1)
    node = _number(env, "SLURM_NODEID")
    here = (_tasks_per_node(env, tasks, _number(env, "SLURM_STEP_NUM_NODES", 1))[node:] or [1])[0]
    if here == 1 or not 1 < launchers < tasks:
        return
    ranks = _number(env, "LOCAL_WORLD_SIZE", 1)
    raise PacelineError(
        "PL362",
        saw=f"srun started {here} tasks on this node, and each of them started torchrun with {ranks} "
        f"rank{'' if ranks == 1 else 's'}: {here * ranks} ranks on one node.",
        rule=f"torchrun starts all ranks of a node; this job has {launchers} nodes, but {tasks} tasks.",
        fix="Start one task per node: srun --ntasks-per-node=1 (and #SBATCH --ntasks-per-node=1).",
    )


def _tasks_per_node(env: Mapping[str, str], world_size: int, num_nodes: int) -> list[int]:
    """Read `"2(x3),1"`: three nodes with two tasks, one with one."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if text is None:
        # srun's default: blocks of equal size, the first nodes take one more.
        return [world_size // num_nodes + (node < world_size % num_nodes) for node in range(num_nodes)]
    counts: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if found is None:
            raise _bad_list(text)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _from_mpi(env: Mapping[str, str]) -> RankPlace:
    needed = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if any(name not in env for name in needed):
        raise _half_set(env, needed, "mpirun")
    rank, world_size, local_rank, local_size = (_number(env, name) for name in needed)
    if world_size == 1:
        return RankPlace(launcher="single")
    all_local = local_size == world_size
    if not all_local and "MASTER_ADDR" not in env:
        raise PacelineError(
            "PL303",
            saw=f"mpirun started {world_size} ranks, {local_size} of them here, and MASTER_ADDR is not set.",
            rule="Ranks on several machines connect to rank 0's machine, and Open MPI does not provide its "
            "name.",
            fix="Add -x MASTER_ADDR=<rank 0's host> to mpirun.",
        )
    # Open MPI's NODE_RANK counts within the node. The node's number is known only if all nodes have equally
    # many ranks.
    per_node = max(1, local_size)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    return RankPlace(
        launcher="mpi",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // per_node,
        num_nodes=-(-world_size // per_node),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_port(env) or _derived_port(f"mpi {job}"),
    )


# ---- numbers and errors


def _derived_port(words: str) -> int:
    """Derive the port from a checksum of the job's name: the same on all ranks without communication."""
    return _FIRST_PORT + zlib.crc32(words.encode()) % _NUM_PORTS


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise PacelineError(
            "PL301",
            saw=f"{name}={env[name]!r}.",
            rule="The launcher sets it to a whole number.",
            fix="Let torchrun, srun or mpirun set it, or unset it for a plain process.",
        ) from None


def _port(env: Mapping[str, str]) -> int | None:
    if "MASTER_PORT" not in env:
        return None
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise PacelineError(
            "PL302",
            saw=f"MASTER_PORT={port}.",
            rule="A port is a number from 1 to 65535.",
            fix="Set it to a free port, for example 29500, the same on all ranks.",
        )
    return port


def _check(place: RankPlace) -> None:
    wrong = None
    if place.world_size < 1:
        wrong = f"world size {place.world_size}"
    elif not 0 <= place.rank < place.world_size:
        wrong = f"rank {place.rank} in a world of {place.world_size} ranks"
    elif not 1 <= place.local_world_size <= place.world_size:
        wrong = f"{place.local_world_size} ranks on this node in a world of {place.world_size}"
    elif not 0 <= place.local_rank < place.local_world_size:
        wrong = f"local rank {place.local_rank} with {place.local_world_size} ranks on this node"
    elif place.local_rank > place.rank:
        wrong = f"local rank {place.local_rank} above rank {place.rank}"
    elif not 0 <= place.node_rank < place.num_nodes:
        wrong = f"node {place.node_rank} of {place.num_nodes} nodes"
    if wrong is not None:
        raise PacelineError(
            "PL302",
            saw=f"The environment states {wrong} (launcher: {place.launcher}).",
            rule="Ranks are numbered from 0 to the number of ranks - 1.",
            fix="Let torchrun, srun or mpirun set these variables, or unset them for a plain process.",
        )


def _half_set(env: Mapping[str, str], needed: tuple[str, ...], launcher: str) -> PacelineError:
    there = ", ".join(f"{name}={env[name]}" for name in needed if name in env)
    missing = ", ".join(name for name in needed if name not in env)
    return PacelineError(
        "PL300",
        saw=f"Set: {there or 'nothing'}. Missing: {missing}.",
        rule=f"A rank started by {launcher} has all of them; a plain process has none.",
        fix=f"Start with {launcher}, set the missing ones (LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 if each "
        "machine runs one process), or unset all of them.",
    )


def _bad_list(text: str) -> PacelineError:
    return PacelineError(
        "PL304",
        saw=f"SLURM's list {text!r}.",
        rule="A node list has the form node[0-2,5],other, and tasks per node the form 2(x3),1.",
        fix="Set MASTER_ADDR to rank 0's host, and start with srun.",
    )
