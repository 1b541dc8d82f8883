"""Explains a log of NCCL_DEBUG=INFO: interface, rings, transports, algorithms, and why something is off.

The lines are those of NCCL 2.10 to 2.30, each behind `host:pid:tid [device] NCCL INFO`:

    NET/Socket : Using [0]eth0:10.0.0.5<0>              NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.5<0>
    Using network Socket                                Channel 00/02 : 0 1 2 3
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read      Channel 00/0 : 3[3] -> 4[0] [send] via NET/IB/0/GDRDMA
    AllReduce: 4194304 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}
    4194304 Bytes -> Algo 1 proto 2 time 42.1           NCCL_P2P_DISABLE set by environment to 1
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.finding import Finding
from paceline.phrases import join

_LINE = re.compile(r"^.*?(?:(?P<host>[\w.-]+):\d+:\d+ )?(?:\[\d+\] )?NCCL (?:INFO|WARN) (?P<text>.*)$")
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_CHOICE = re.compile(r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
_VIRTUAL = re.compile(r"lo$|docker|veth|virbr|br-|tailscale|wl|tun")


@dataclass
class NcclLog:
    """The facts that a log of NCCL states.

    Attributes:
        version: of NCCL.
        network: `IB`, `Socket` or a plugin's name.
        interfaces: by kind of network, the devices that NCCL found.
        rings: the order of ranks of each channel.
        transports: how often ranks are connected by each, such as `P2P` or `NET/IB`.
        direct: of connections by network, those with GPUDirect RDMA.
        choices: algorithm and protocol by size in bytes.
        variables: of NCCL, that it read from the environment.
        reasons: lines that say why something is off.
        hosts: that wrote the log.
    """

    version: str = ""
    network: str = ""
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    rings: dict[str, list[int]] = field(default_factory=dict)
    transports: Counter[str] = field(default_factory=Counter)
    direct: int = 0
    choices: dict[int, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


def read_nccl_log(text: str) -> NcclLog:
    """Return what the lines of NCCL in a log say; lines of others are passed over."""
    log = NcclLog()
    for line in text.splitlines():
        if version := re.search(r"NCCL version (\S+)", line):
            log.version = version[1]
        if (found := _LINE.match(line)) is None:
            continue
        if found["host"]:
            log.hosts.add(found["host"])
        _read_line(log, found["text"].strip())
    return log


def _read_line(log: NcclLog, text: str) -> None:
    if found := re.match(r"NET/(\w+) : Using (.*)", text):
        devices = re.findall(r"\[\d+\]([^\s;<]+)", found[2])
        log.interfaces.setdefault(found[1], [each.partition(":")[0] for each in devices])
    elif found := re.match(r"Using network (\w+)", text):
        log.network = found[1]
    elif found := re.match(r"Channel (\d+)/\d+ :((?:\s+\d+)+)$", text):
        log.rings[found[1]] = [int(rank) for rank in found[2].split()]
    elif found := re.match(r"Channel \d+(?:/\d+)? : \S+ -> \S+ .*via (\w+)(/\w+)?(.*)", text):
        kind = found[1] + (found[2] or "") if found[1] == "NET" else found[1]
        log.transports[kind] += 1
        log.direct += "GDRDMA" in text
    elif found := _CHOICE.search(text):
        names = [
            known[int(word)]
            if word.isdigit() and int(word) < len(known)
            else next((name for name in known if name.upper() == word.upper()), word)
            for word, known in ((found[3], _ALGORITHMS), (found[4], _PROTOCOLS))
        ]
        log.choices[int(found[2])] = " ".join(names)
    elif found := re.match(r"(NCCL_\w+) set by environment to (\S+?)\.?$", text):
        log.variables[found[1]] = found[2]
    if re.search(r"P2P is disabled|GPU Direct RDMA Disabled", text) and text not in log.reasons:
        log.reasons.append(text)


def describe_nccl_log(log: NcclLog) -> str:
    """Return the choices of NCCL in lines of a name and a value."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for size, choice in sorted(log.choices.items()):
        sizes[choice].append(size)
    ring = next(iter(log.rings.values()), [])
    devices = ", ".join(log.interfaces.get(log.network, [])) or "no device"
    rows = {
        "NCCL": log.version or "unknown version",
        "network": f"{log.network or 'none'} ({devices})",
        "channels": f"{len(log.rings)}, the first ring {' '.join(map(str, ring))}"
        if ring
        else "not in the log",
        "connections": ", ".join(f"{count} by {kind}" for kind, count in log.transports.most_common()),
        "algorithms": "; ".join(f"{choice} {min(each)} to {max(each)} B" for choice, each in sizes.items()),
        "variables": ", ".join(f"{name}={value}" for name, value in log.variables.items()),
    }
    missing = "not in the log (NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,TUNING)"
    return "\n".join(f"  {name:<12} {value or missing}" for name, value in rows.items())


def judge_nccl_log(log: NcclLog) -> Iterator[Finding]:
    """Yield what makes collectives slower than the hardware allows."""
    where = join(sorted(log.hosts)) or "the log"
    by_network = {kind: count for kind, count in log.transports.items() if kind.startswith("NET")}
    spans_nodes = len(log.hosts) > 1 or bool(by_network)
    devices = log.interfaces.get(log.network, [])
    if log.network == "Socket" and spans_nodes:
        off = log.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0")
        why = "NCCL_IB_DISABLE is set" if off else "it found no InfiniBand or RoCE device"
        yield Finding(
            "PL994",
            where,
            saw=f"NCCL sends between nodes by TCP over {join(devices) or 'no device'}: {why}.",
            rule="TCP reaches a tenth of InfiniBand, and every byte is copied through the host's memory.",
            fix="Unset NCCL_IB_DISABLE."
            if off
            else "If the nodes have InfiniBand, look at ibstat, and pass /dev/infiniband to the container. "
            "Else this is the network there is.",
        )
    virtual = [device for device in devices if _VIRTUAL.match(device)]
    if spans_nodes and virtual:
        yield Finding(
            "PL995",
            where,
            saw=f"NCCL may use {join(virtual)}.",
            rule="Such an interface leads to this machine alone, or through a tunnel.",
            fix="Name the interface between the nodes: NCCL_SOCKET_IFNAME=eth0.",
        )
    if log.network == "IB" and by_network and log.direct < sum(by_network.values()):
        total = sum(by_network.values())
        yield Finding(
            "PL996",
            where,
            saw=f"{total - log.direct} of {total} connections between nodes go "
            "without GPUDirect RDMA" + _quote(log, "GPU Direct"),
            rule="Data then takes the way through the host's memory, at about half the rate.",
            fix="Load the module nvidia_peermem, and choose the adapter beside the GPU (nvidia-smi topo -m).",
        )
    p2p_set = [f"{n}={v}" for n, v in log.variables.items() if n.startswith("NCCL_P2P_")]
    if p2p_set or any("P2P is disabled" in line for line in log.reasons):
        yield Finding(
            "PL997",
            where,
            saw="GPUs of a node do not exchange directly (P2P)"
            + (f": {join(p2p_set)} is set." if p2p_set else _quote(log, "P2P is disabled")),
            rule="Data then takes the way through shared memory, at a fraction of NVLink's rate.",
            fix=f"Unset {join([each.partition('=')[0] for each in p2p_set])}."
            if p2p_set
            else "Switch off ACS in the PCIe bridges, or accept it in a virtual machine.",
        )


def _quote(log: NcclLog, word: str) -> str:
    line = next((line for line in log.reasons if word in line), "")
    return f": {line}." if line else "."
