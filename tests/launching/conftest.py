"""SLURM for the tests of this folder: this machine as a cluster of one node, or as one of two."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

CONF = """
ClusterName=paceline
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
{more}
"""
ONE_NODE = "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
# The time between two checks for time limits is SLURM's own and takes up to a minute. Jobs of the partition
# "urgent" preempt those of "debug", which get a minute to leave.
TWO_NODES = """
KillWait=60
SlurmdTimeout=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="package")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for srun and sbatch on a fresh cluster of one node."""
    host = socket.gethostname().split(".")[0]
    with run_cluster(tmp_path_factory.mktemp("slurm"), {host: 2}, ONE_NODE) as env:
        yield env


@pytest.fixture(scope="package")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for srun and sbatch on a fresh cluster of two nodes, which are both this machine."""
    with run_cluster(tmp_path_factory.mktemp("slurm2"), {"h0": 1, "h1": 1}, TWO_NODES) as env:
        yield env


@contextmanager
def run_cluster(folder: Path, nodes: dict[str, int], more: str) -> Iterator[dict[str, str]]:
    """Start SLURM for nodes with these numbers of cores, and give the environment of its commands."""
    for program in ("munged", "slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root")
    host = socket.gethostname().split(".")[0]
    if not resolves(host):
        pytest.skip(f"this machine's name {host} does not resolve")
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    first_job = random.randrange(1, 10**6)  # ranks meet at a port that follows from it: not another cluster's
    port, *ports = free_ports(1 + len(nodes))
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs={cores} RealMemory=1000 "
        "State=UNKNOWN"
        for (node, cores), at in zip(nodes.items(), ports, strict=True)
    ]
    text = CONF.format(
        host=host, folder=folder, port=port, first_job=first_job, more="\n".join([*lines, more])
    )
    conf.write_text(text)
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": os.environ["PATH"] + ":/usr/sbin"}
    options = [f"--{name}={folder}/munge.{end}" for name, end in MUNGE_FILES.items()]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", "--num-threads=1", *options],
            ["slurmctld", "-D", "-f", str(conf)],
            *(["slurmd", "-D", "-N", node, "-f", str(conf)] for node in nodes),
        ):
            log = (folder / f"{len(daemons)}-{command[0]}.out").open("wb")
            with log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            time.sleep(0.5)
        end = time.monotonic() + 20
        while _state(env).split() != ["idle"] * len(nodes):
            if time.monotonic() > end:
                pytest.skip(f"SLURM does not come up here: {_logs(folder)}")
            time.sleep(0.2)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


MUNGE_FILES = {
    "socket": "socket",
    "key-file": "key",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def _state(env: dict[str, str]) -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "debug", "-o", "%t"], env=env, capture_output=True, text=True, timeout=20
    )
    return done.stdout


def _logs(folder: Path) -> str:
    return " | ".join(path.read_text()[-300:] for path in folder.glob("*.out"))
