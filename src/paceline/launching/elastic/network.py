"""Finds where the nodes of a job meet, and the address and interface by which they reach this one.

torchrun and gloo go by this machine's name. If it resolves to 127.0.1.1 (Debian's default), gloo sends its
peers that address, and they connect to themselves; where it stands for nothing, the rendezvous fails. The
route to the place where the nodes meet knows better: its local end is where others reach this node.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
from collections.abc import MutableMapping
from contextlib import suppress

import psutil

from paceline.errors import PacelineError
from paceline.launching.members.endpoints import read_endpoints
from paceline.place import RankPlace, drop_rank_variables, read_environment
from paceline.schedulers.target import read_nodes

log = logging.getLogger(__name__)

_INTERFACE = "GLOO_SOCKET_IFNAME"
_DEFAULT_PORT = 29500


def choose_rendezvous(flags: argparse.Namespace, place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Complete torchrun's flags in place, from SLURM's or MPI's variables and the route to the other nodes.

    Sets `GLOO_SOCKET_IFNAME` for several nodes, where it is not set.
    """
    if place.launcher in ("slurm", "mpi") and flags.nnodes is None:
        _follow_scheduler(flags, place, environ)
    flags.nnodes = flags.nnodes or "1:1"
    if read_nodes(flags.nnodes, "--nnodes").most == 1:
        has_address = flags.rdzv_endpoint or flags.master_port is not None
        is_any_port = flags.rdzv_backend == "c10d" and flags.rdzv_endpoint.endswith(":0")
        if flags.standalone or is_any_port or (flags.rdzv_backend == "static" and not has_address):
            flags.standalone = True  # what torchrun makes of it
        return
    endpoint = host = flags.rdzv_endpoint
    if not endpoint and flags.rdzv_backend == "static":
        host = flags.master_addr
    elif flags.rdzv_backend == "folder" or "store_type=file" in flags.rdzv_conf:
        host = socket.gethostname()
    elif flags.rdzv_backend == "etcd":
        host = _find_resolving([host for host, _ in read_endpoints(endpoint.rpartition("://")[2])])
    elif ":" in endpoint and not endpoint.endswith("]"):
        host = endpoint.rpartition(":")[0]
    host = host.strip("[]")
    if flags.standalone or not host:
        return
    if not endpoint and flags.rdzv_backend == "static" and host in ("127.0.0.1", "localhost"):
        log.warning(
            "--nnodes %s without an address: nodes meet at %s:%s, which other machines cannot reach; pass "
            "--rdzv-backend c10d --rdzv-endpoint HOST, or --master-addr HOST",
            *(flags.nnodes, host, flags.master_port or _DEFAULT_PORT),
        )
    meeting = _resolve(host)
    address = flags.local_addr or _find_own_address(host, meeting, environ.get(_INTERFACE, ""))
    if address is None or ipaddress.ip_address(_resolve(address)).is_loopback:
        # All nodes are this machine. torch would make the ranks meet at its name, which may not resolve.
        flags.local_addr = address or "localhost"
        return
    flags.local_addr = address
    if _INTERFACE not in environ:
        name = _own_addresses().get(_resolve(address))
        if name is not None:
            environ[_INTERFACE] = name
            log.info("this node is reached at %s, on %s (%s)", address, name, _INTERFACE)


def read_place(flags: argparse.Namespace, environ: MutableMapping[str, str]) -> RankPlace:
    """Return this process's place; flags that start ranks override torchrun's variables, as in torchrun.

    The variables are then removed. If they number the pods of a Kubeflow PyTorchJob, which have no local
    numbers, they supply the number of nodes, this node's number and the address that the flags leave out.
    """
    starts_ranks = flags.nproc_per_node is not None or flags.nnodes is not None or flags.standalone
    starts_ranks |= "MASTER_ADDR" not in environ and environ.get("WORLD_SIZE") == "1"  # nowhere to meet
    if not starts_ranks or not environ.get("RANK", environ.get("WORLD_SIZE", "")).strip():
        return read_environment(environ)
    if "TORCHELASTIC_RUN_ID" in environ and read_environment(environ).local_world_size > 1:
        raise PacelineError(
            "PL348",
            saw=f"RANK={environ['RANK']} and LOCAL_WORLD_SIZE={environ['LOCAL_WORLD_SIZE']} with flags that "
            "start ranks.",
            rule="Each of the ranks that torchrun started here would start ranks of its own.",
            fix="Leave --nproc-per-node, --nnodes and --standalone out, or start `paceline run` by itself.",
        )
    found = drop_rank_variables(environ)
    size, rank = found.get("WORLD_SIZE", ""), found.get("RANK", "")
    numbers_pods = size.isdigit() and rank.isdigit() and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & found.keys()
    listed = ", ".join(f"{name}={value}" for name, value in found.items())
    if numbers_pods and size != "1" and flags.nnodes is None and not flags.standalone:
        flags.nnodes, flags.node_rank = size, int(rank)
        flags.master_addr = found.get("MASTER_ADDR", flags.master_addr)
        flags.master_port = flags.master_port or int(found.get("MASTER_PORT", _DEFAULT_PORT))
        log.info("%s in the environment: this is node %s of %s, without --nnodes", listed, rank, size)
    else:
        log.info("%s in the environment: not used, because this command starts ranks", listed)
    return read_environment(environ)


def is_own_host(host: str) -> bool:
    """Return whether a host, given by name or address, is this machine."""
    address = _resolve(host)
    return ipaddress.ip_address(address).is_loopback or address in _own_addresses()


def _follow_scheduler(flags: argparse.Namespace, place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Set the nodes' flags if srun or mpirun runs one task on each node."""
    flags.nnodes = str(place.world_size)
    if flags.rdzv_endpoint or flags.master_port is not None:
        flags.node_rank = flags.node_rank or place.rank
        return
    flags.rdzv_backend = "c10d"
    flags.rdzv_endpoint = f"{place.master_addr}:{place.master_port}"
    if flags.rdzv_id == "none":
        job = environ.get("SLURM_JOB_ID") or environ.get("PMIX_NAMESPACE") or "job"
        flags.rdzv_id = f"{job}.{environ.get('SLURM_STEP_ID', '0')}"
    if "is_host" not in flags.rdzv_conf:
        is_host = f"is_host={str(place.rank == 0).lower()}"
        flags.rdzv_conf = ",".join(part for part in (flags.rdzv_conf, is_host) if part)


def _resolve(host: str) -> str:
    """Return a host's address."""
    try:
        found = socket.getaddrinfo(host, _DEFAULT_PORT, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PacelineError(
            "PL346",
            saw=f"{host!r} does not resolve on this node ({socket.gethostname()}): {error.strerror}.",
            rule="Every node must be able to reach the rendezvous host.",
            fix="Use its IP address, or add the name to /etc/hosts or DNS on every node.",
        ) from None
    return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])


def _find_resolving(hosts: list[str]) -> str:
    """Return the first host that resolves: the name of a node that is gone may be gone too."""
    for host in hosts[:-1]:
        with suppress(PacelineError):
            _resolve(host)
            return host
    return hosts[-1]


def _own_addresses() -> dict[str, str]:
    """Return this machine's addresses, with the names of their interfaces."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    } | {f"127.0.{a}.1": "lo" for a in (0, 1)}


def _find_own_address(host: str, meeting: str, interfaces: str) -> str | None:
    """Return this node's address as seen by the others; None if the nodes meet at the loopback on purpose."""
    if not ipaddress.ip_address(meeting).is_loopback:
        family = socket.AF_INET6 if ":" in meeting else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((meeting, _DEFAULT_PORT))  # sends nothing: it only finds the route
            except OSError as error:
                raise PacelineError(
                    "PL346",
                    saw=f"No route from this node ({socket.gethostname()}) to {host}: {error.strerror}.",
                    rule="Every node must be able to reach the rendezvous host.",
                    fix="Check the address, and this node's network interfaces (ip addr).",
                ) from None
            return str(probe.getsockname()[0])
    if host in ("localhost", meeting):
        return None
    # On this node its own name may resolve to the loopback; on other nodes it resolves to a real address.
    candidates = {address: name for address, name in _own_addresses().items() if _is_reachable(address)}
    chosen = [address for address, name in candidates.items() if name in interfaces.split(",")]
    if chosen:
        return chosen[0]
    if len(candidates) == 1:
        return next(iter(candidates))
    listed = ", ".join(f"{name} {address}" for address, name in candidates.items()) or "none"
    raise PacelineError(
        "PL347",
        saw=f"The name {host!r} resolves to {meeting} on this node, which other nodes cannot reach, and "
        f"{'several interfaces are suitable' if candidates else 'there is no other interface'}: {listed}.",
        rule="Ranks on other nodes connect to the address that this node publishes.",
        fix=f"Pass this node's address with --local-addr, or set {_INTERFACE} (and NCCL_SOCKET_IFNAME); or "
        "correct /etc/hosts, so that its name resolves to its own address instead of 127.0.1.1.",
    )


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    name = _own_addresses().get(address, "")
    stats = psutil.net_if_stats().get(name)
    is_up = stats is not None and stats.isup
    virtual = name.startswith(("docker", "veth", "virbr", "br-"))
    return (
        is_up and not virtual and parsed.version == 4 and not parsed.is_loopback and not parsed.is_link_local
    )


def describe_place(place: RankPlace) -> dict[str, str]:
    """Return torchrun's variables for a rank that srun or mpirun has started."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_ADDR": str(place.master_addr),
        "MASTER_PORT": str(place.master_port),
    }
