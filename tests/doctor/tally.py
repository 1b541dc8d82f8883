# ruff: noqa: E501
"""Plants faults in clusters of namespaces and counts what the doctor names: `python -m tests.doctor.tally`.

Each case is a cluster of three nodes (or one machine) with one fault, and the command as a user types it. A
fault counts as named if a finding has its code, its node or link, and a word of its cause, and no finding is
about anything else. What a healthy cluster of this machine shows is left out. A run of all cases writes
docs/tables/doctor.md; `--only NAME` runs some.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.doctor.cluster.judge import are_busy
from tests.launching.nodes import Nodes, OwnName, why_no_nodes

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "doctor.md"
PORT = 29500
RATE_MBIT = 200.0
_LIMIT_S = 150.0

# Read by an interpreter that a node starts, before the command.
_CLOCK = "import time\nreal, begin = time.time, time.monotonic()\ntime.time = lambda: real() + {}\n"
_WRONG = (
    "import sys\n"
    "if 'cluster.rank' in ' '.join(sys.orig_argv):\n"
    "    import torch.distributed as dist\n"
    "    real = dist.{0}\n"
    "    def wrong(tensor, *words, **named):\n"
    "        real(tensor, *words, **named)\n"
    "        tensor += 1\n"
    "    dist.{0} = wrong\n"
)
_GPU = "0, NVIDIA H100, {errors}, Not Active, Not Active, 700.00, 700.00, {lanes}, 16, 4, 81559"


@dataclass(frozen=True)
class Start:
    """How a node starts the command.

    Attributes:
        environ: variables beside those of this process.
        own_name: what its name stands for there.
        site: text of a `sitecustomize.py`.
        setup: shell commands before it, in its own mount namespace; `$HOME_DIR` is a folder of the node's own.
        words: of the command, added to those of all nodes.
        host_name: another one.
        endpoint: another meeting place.
        times: how often it is started.
    """

    environ: dict[str, str] = field(default_factory=dict)
    own_name: OwnName = "address"
    site: str = ""
    setup: str = ""
    words: tuple[str, ...] = ()
    host_name: str = ""
    endpoint: str = ""
    times: int = 1


Starts = dict[int, Start]


@dataclass(frozen=True)
class Fault:
    """A planted fault, and what has to be said.

    Attributes:
        name: for the table.
        code: of the finding.
        where: a pattern that the finding's place or text matches: node or link.
        saw: a pattern for the cause.
        starts: how nodes start that differ.
        plant: changes the network; a context manager that also may do something while the command runs.
        words: of the command on every node.
        count: nodes; 1 is `paceline doctor` on one machine.
        only: the nodes that start it.
        others: codes that follow from the fault and may be said too.
    """

    name: str
    code: str
    where: str
    saw: str
    starts: Starts = field(default_factory=dict)
    plant: Callable[[Nodes], AbstractContextManager[Any]] = lambda _: nullcontext()
    words: tuple[str, ...] = ("--no-collectives",)
    count: int = 3
    only: tuple[int, ...] = (0, 1, 2)
    others: tuple[str, ...] = ()


def ip(nodes: Nodes, node: int, *words: str) -> None:
    """Run `ip` in a node."""
    subprocess.run(["ip", "-n", nodes.namespace(node), *words], check=True)


def shape(namespace: str, device: str, *words: str) -> None:
    """Run `tc` on a device."""
    subprocess.run(["tc", "-n", namespace, *words[:2], "dev", device, *words[2:]], check=True)


@contextlib.contextmanager
def rule(nodes: Nodes, node: int, *words: str) -> Iterator[None]:
    """Add a rule of routing, which knows ports."""
    ip(nodes, node, "rule", "add", *words)
    yield


@contextlib.contextmanager
def slow_link(nodes: Nodes, pairs: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Slow what nodes send to one other node."""
    for sender, receiver in pairs:
        space = nodes.namespace(sender)
        shape(space, "eth0", "qdisc", "replace", "root", "handle", "1:", "htb", "default", "10")
        for name, rate in (("10", RATE_MBIT), ("20", RATE_MBIT / 10)):
            limits = ("htb", "rate", f"{rate:g}mbit", "burst", "4k", "cburst", "4k")
            shape(space, "eth0", "class", "add", "parent", "1:", "classid", f"1:{name}", *limits)
        match = ("u32", "match", "ip", "dst", f"{nodes.address(receiver)}/32", "flowid", "1:20")
        shape(space, "eth0", "filter", "add", "parent", "1:", "protocol", "ip", *match)
    yield


@contextlib.contextmanager
def slow_node(nodes: Nodes, direction: str = "both") -> Iterator[None]:
    """Slow all links of node 2."""
    if direction == "both":
        nodes.limit(2, RATE_MBIT / 10)
    else:
        shaped = ("tbf", "rate", f"{RATE_MBIT / 10:g}mbit", "burst", "4000", "latency", "100ms")
        shape(nodes.namespace(2), "eth0", "qdisc", "replace", "root", *shaped)
    yield


@contextlib.contextmanager
def small_packets(nodes: Nodes) -> Iterator[None]:
    """Have the switch carry 600 bytes towards node 1, whose own interface believes in 1,500."""
    subprocess.run(["ip", "-n", nodes.switch, "link", "set", "p1", "mtu", "600"], check=True)
    yield


@contextlib.contextmanager
def deaf(nodes: Nodes) -> Iterator[None]:
    """Lose what node 1 sends to node 2."""
    words = ["neigh", "replace", nodes.address(2), "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    ip(nodes, 1, *words, "dev", "eth0")
    yield


@contextlib.contextmanager
def lossy(nodes: Nodes) -> Iterator[None]:
    """Lose a packet in twenty on the way to node 2: a short queue in front of a slower line."""
    shaped = ("tbf", "rate", f"{0.7 * RATE_MBIT:g}mbit", "burst", "6000", "limit", "12000")
    shape(nodes.switch, "p2", "qdisc", "replace", "root", *shaped)
    yield


@contextlib.contextmanager
def extra_interface(nodes: Nodes, name: str, address: str) -> Iterator[None]:
    """Give each node an interface to which no other node is connected."""
    for node in range(3):
        for words in (
            ("link", "add", name, "type", "veth", "peer", "name", "nowhere"),
            ("addr", "add", address.format(10 + node), "dev", name),
            ("link", "set", name, "up"),
            ("link", "set", "nowhere", "up"),
        ):
            ip(nodes, node, *words)
    yield


@contextlib.contextmanager
def firewall(nodes: Nodes, node: int, *rules: tuple[str, Sequence[str]]) -> Iterator[None]:
    """Let pass or lose what a node sends, by the first rule of `u32` that matches: "pass" or "lose"."""
    space = nodes.namespace(node)
    shape(space, "eth0", "qdisc", "replace", "root", "handle", "1:", "htb", "default", "10")
    for name, rate in (("10", RATE_MBIT), ("99", 1.0)):
        limits = ("htb", "rate", f"{rate:g}mbit", "burst", "25k", "cburst", "25k", "quantum", "9000")
        shape(space, "eth0", "class", "add", "parent", "1:", "classid", f"1:{name}", *limits)
    # No packet is as small as this bucket.
    lost = ("tbf", "rate", "8kbit", "burst", "20", "limit", "20")
    shape(space, "eth0", "qdisc", "add", "parent", "1:99", "handle", "99:", *lost)
    for number, (fate, match) in enumerate(rules, start=1):
        flow = ("flowid", "1:99" if fate == "lose" else "1:10")
        prio = ("parent", "1:", "protocol", "ip", "prio", str(number), "u32")
        shape(space, "eth0", "filter", "add", *prio, *match, *flow)
    yield


@contextlib.contextmanager
def closed_ports(nodes: Nodes) -> Iterator[None]:
    """Lose all connections but those of the meeting place, whose conversation keeps its port."""
    rules = [("pass", ("match", "ip", end, str(PORT), "0xffff")) for end in ("sport", "dport")]
    with ExitStack() as stack:
        for node in range(3):
            lose = ("lose", ("match", "ip", "protocol", "6", "0xff"))
            stack.enter_context(firewall(nodes, node, *rules, lose))
        yield


@contextlib.contextmanager
def held_port(nodes: Nodes) -> Iterator[None]:
    """Have another program listen at the meeting place."""
    words = ["nsenter", f"--net=/run/netns/{nodes.namespace(0)}", sys.executable, "-c"]
    words.append(f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(600)")
    with subprocess.Popen(words) as holder:
        time.sleep(1)
        yield
        holder.kill()


@contextlib.contextmanager
def throttled(nodes: Nodes) -> Iterator[None]:
    """Let node 2's processes run for a third of the time, as under a quota."""
    ended = threading.Event()

    def throttle() -> None:
        while not ended.is_set():
            listed = subprocess.run(
                ["ip", "netns", "pids", nodes.namespace(2)], capture_output=True, text=True
            )
            pids = [int(pid) for pid in listed.stdout.split()]
            for _ in range(10):
                for kind, pause_s in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.03)):
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, kind)
                    time.sleep(pause_s)

    thread = threading.Thread(target=throttle)
    thread.start()
    yield
    ended.set()
    thread.join()


def program(name: str, text: str) -> str:
    """Return shell commands that put a program in front of others."""
    script = f"#!/bin/sh\\n{text}\\n"
    return f"printf '{script}' > $HOME_DIR/{name}; chmod +x $HOME_DIR/{name}; export PATH=$HOME_DIR:$PATH; "


def gpus(count: int, **odd: object) -> str:
    """Return shell commands for a machine with some GPUs: what nvidia-smi answers, and /sys."""
    values = {"errors": 0, "lanes": 16}
    rows = [str(i) + _GPU.format(**(values | (odd if i == count - 1 else {})))[1:] for i in range(count)]
    files = "".join(
        f"mkdir -p $HOME_DIR/pci/{i}; echo 0x10de > $HOME_DIR/pci/{i}/vendor; "
        f"echo 0x030200 > $HOME_DIR/pci/{i}/class; "
        for i in range(count)
    )
    mount = "mount --bind $HOME_DIR/pci /sys/bus/pci/devices; "
    return files + mount + program("nvidia-smi", 'echo "' + "\\n".join(rows) + '"')


def infiniband(**odd: str) -> str:
    """Return shell commands for two ports of InfiniBand in /sys."""
    lines = ""
    for device in ("mlx5_0", "mlx5_1"):
        files = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"} | (odd if device == "mlx5_1" else {})
        folder = f"$HOME_DIR/class/infiniband/{device}/ports/1"
        lines += f"mkdir -p {folder}; "
        lines += "".join(f'echo "{text}" > {folder}/{name}; ' for name, text in files.items())
    return (
        lines + "cp -a /sys/class/net $HOME_DIR/class/ 2>/dev/null; mount --bind $HOME_DIR/class /sys/class; "
    )


def old_torch() -> str:
    """Return shell commands that install the metadata of another torch in front."""
    folder = "$HOME_DIR/torch-2.4.0.dist-info"
    text = f"mkdir -p {folder}; printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 2.4.0\\n' > {folder}/METADATA; "
    return text + "export PYTHONPATH=$HOME_DIR:$PYTHONPATH; "


def stop_in_the_middle(kind: int) -> Callable[[Nodes], AbstractContextManager[Any]]:
    """Return what stops node 2's command once the links are measured."""

    @contextlib.contextmanager
    def plant(nodes: Nodes) -> Iterator[None]:
        def stop() -> None:
            words = ["nsenter", f"--net=/run/netns/{nodes.namespace(2)}", "ss", "-Htn", "dport", f":{PORT}"]
            while not (ended.is_set() or subprocess.run(words, capture_output=True).stdout):
                time.sleep(0.1)
            time.sleep(1)
            found = subprocess.run(
                ["ip", "netns", "pids", nodes.namespace(2)], capture_output=True, text=True
            )
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), kind)

        ended = threading.Event()
        thread = threading.Thread(target=stop)
        thread.start()
        yield
        ended.set()
        thread.join()

    return plant


def hosts(name: str, address: str) -> str:
    """Return shell commands after which a name stands for an address."""
    line = f"sed 's/.*{name}$/{address} {name}/' /etc/hosts > $HOME_DIR/hosts; "
    return line + "mount --bind $HOME_DIR/hosts /etc/hosts; "


# TCP packets that begin a connection: SYN without ACK.
SYN = ("match", "u8", "0x02", "0x12", "at", "33")
SHM = "mount -t tmpfs -o size=16m tmpfs /dev/shm; "
OWN_FOLDER = "mkdir -p $RUNS; mount -t tmpfs -o size={size} tmpfs $RUNS; "
FAULTS = (
    Fault("the port of the meeting place dropped", "PL983", "node2|1 of 3", "did not answer|did not come",
          {}, lambda n: rule(n, 0, "to", n.address(2), "sport", str(PORT), "blackhole")),
    Fault("connections refused", "PL984", "node1.*node2", "unreachable|route|refused",
          plant=lambda n: rule(n, 1, "to", n.address(2), "ipproto", "tcp", "unreachable")),
    Fault("one direction lost", "PL984", "node1.*node2|node2.*node1", "timed out|arrives", plant=deaf),
    Fault("a wrong address for the meeting place", "PL983", "1 of 3|node1", "did not come",
          {1: Start(endpoint="10.77.0.99:29500")}),
    Fault("a node's name stands for 127.0.1.1", "PL976", "node1", "127.0.1.1", {1: Start(own_name="loopback")}),
    Fault("a node's name stands for nothing", "PL976", "node1", "does not resolve", {1: Start(own_name="nothing")}),
    Fault("a node's name stands for another node", "PL976", "node1", "10.77.0.10|no address of this",
          {1: Start(setup=hosts("node1", "10.77.0.10"))}),
    Fault("a node's name stands for a bridge of containers", "PL976", "node1", "announce 172.17.0.1",
          {1: Start(setup=hosts("node1", "172.17.0.1"))},
          lambda n: extra_interface(n, "docker0", "172.17.0.1/16")),
    Fault("an interface of a network that others do not reach", "PL976", "node1", "announce 192.168.9.11",
          {1: Start(environ={"GLOO_SOCKET_IFNAME": "eth1"})},
          lambda n: extra_interface(n, "eth1", "192.168.9.{}/24")),
    Fault("a node that may not open connections to another", "PL984", "node1 to node2", "cannot be reached",
          plant=lambda n: firewall(n, 1, ("lose", ("match", "ip", "dst", f"{n.address(2)}/32", *SYN)))),
    Fault("all ports but one closed", "PL984", "node0, node1 and node2", "every other one cannot",
          plant=closed_ports),
    Fault("two nodes of one name", "PL992", "cluster", "2 nodes have the name node1", {2: Start(host_name="node1")},
          others=("PL976",)),
    Fault("an interface that does not exist", "PL977", "node1", "eth9",
          {1: Start(environ={"GLOO_SOCKET_IFNAME": "eth9"})}),
    Fault("an interface that leads nowhere", "PL976", "node1", "127.0.0.1 there .GLOO_SOCKET_IFNAME=lo",
          {1: Start(environ={"GLOO_SOCKET_IFNAME": "lo"})}, words=()),
    Fault("a path that loses large packets", "PL984", "node1", "nothing larger arrives", plant=small_packets),
    Fault("a slow link, both ways", "PL985", "node1 to node2|node2 to node1", "Mbit/s",
          plant=lambda n: slow_link(n, [(1, 2), (2, 1)])),
    Fault("a slow link, one way", "PL985", "node1 to node2", "Mbit/s", plant=lambda n: slow_link(n, [(1, 2)])),
    Fault("all links of a node slow", "PL985", "all links of node2", "Mbit/s", plant=slow_node),
    Fault("a node that sends slowly", "PL985", "all links from node2", "Mbit/s",
          plant=lambda n: slow_node(n, "out")),
    Fault("a link that loses packets", "PL985", "node2", "sent again|Mbit/s", plant=lossy),
    Fault("a slow node (a third of a core)", "PL986", "node2", "% of what is usual", plant=throttled),
    Fault("a node that is killed", "PL983", "node2", "fell silent", plant=stop_in_the_middle(signal.SIGKILL)),
    Fault("a node that stops answering", "PL983", "node2", "fell silent",
          plant=stop_in_the_middle(signal.SIGSTOP)),
    Fault("a node that never comes", "PL983", "cluster", "1 of 3 nodes did not come", only=(0, 1)),
    Fault("a node that comes twice", "PL992", "cluster", "have the (name|address)", {1: Start(times=2)},
          only=(0, 1)),
    Fault("a clock 3 s ahead", "PL975", "node1", "\\+3\\.0", {1: Start(site=_CLOCK.format("3"))}),
    Fault("a clock that drifts", "PL975", "node1", "moved", {1: Start(
        site=_CLOCK.format("0.05 * (time.monotonic() - begin)"))}),
    Fault("another torch", "PL988", "node1", "torch: node1 has 2.4.0", {1: Start(setup=old_torch())},
          others=("PL979",)),
    Fault("another Python", "PL988", "node2", "Python: node2 has 3.99", {2: Start(
        site="import platform\nplatform.python_version = lambda: '3.99'\n")}),
    Fault("a proxy on one node", "PL988", "node2", "http_proxy: node2 has http://proxy:3128", {2: Start(
        environ={"http_proxy": "http://user:secret@proxy:3128"})}),
    Fault("another script", "PL988", "node1", "script", {1: Start(setup="cp train.py $HOME_DIR/train.py; "
          "echo '# changed' >> $HOME_DIR/train.py; mount --bind $HOME_DIR/train.py train.py; ")},
          words=("--no-collectives", "train.py")),
    Fault("another variable", "PL988", "node1", "NCCL_ALGO", {1: Start(environ={"NCCL_ALGO": "Ring"})}),
    Fault("another number of nodes", "PL988", "node1", "--nnodes: node1 has 4", {1: Start(words=("--nnodes", "4"))}),
    Fault("a tiny /dev/shm", "PL972", "node1", "16.0 MiB", {1: Start(setup=SHM)}),
    Fault("few open files", "PL973", "node1", "256 open files", {1: Start(setup="ulimit -n 256; ")}),
    Fault("a full disk", "PL974", "node1", "No space left", {1: Start(
        setup=OWN_FOLDER.format(size="1m") + "dd if=/dev/zero of=$RUNS/full bs=64k 2>/dev/null; ")},
        words=("--no-collectives", "--folder", "runs"), others=("PL990",)),
    Fault("a slow disk", "PL974", "node1", "a MiB needs", {1: Start(
        site="import os, time\nreal = os.fsync\ndef fsync(fd):\n    time.sleep(0.7)\n    real(fd)\nos.fsync = fsync\n")}),
    Fault("a disk that is read-only", "PL974", "node1", "written", {1: Start(
        setup="mkdir -p $RUNS; mount --bind $RUNS $RUNS; mount -o remount,bind,ro $RUNS; ")},
        words=("--no-collectives", "--folder", "runs")),
    Fault("a folder that is not shared", "PL990", "node1", "not the folder", {1: Start(
        setup=OWN_FOLDER.format(size="2g"))}, words=("--no-collectives", "--folder", "runs"), others=("PL974",)),
    Fault("a memory limit below what ranks need", "PL971", "node1", "MiB for", {1: Start(
        setup="mkdir -p $HOME_DIR/cg/memory; echo 268435456 > $HOME_DIR/cg/memory/memory.limit_in_bytes; "
              "echo 268435456 > $HOME_DIR/cg/memory.max; mount --bind $HOME_DIR/cg /sys/fs/cgroup; ")}),
    Fault("the port held by another program", "PL978", "port", "held by process",
          plant=held_port, count=1, words=()),
    Fault("a wrong result of all_reduce", "PL989", "node1", "all_reduce gave wrong numbers",
          {1: Start(site=_WRONG.format("all_reduce"))}, words=()),
    Fault("a wrong result of broadcast", "PL989", "node2", "broadcast gave wrong numbers",
          {2: Start(site=_WRONG.format("broadcast"))}, words=()),
    Fault("more ranks than GPUs", "PL980", "", "4 ranks for 2", {0: Start(setup=gpus(2))}, count=1,
          words=("--nproc-per-node", "4"), others=("PL979", "PL970", "PL971")),
    Fault("a GPU with memory errors", "PL980", "GPU 7", "3 uncorrected memory errors",
          {0: Start(setup=gpus(8, errors=3))}, count=1, words=(), others=("PL979",)),
    Fault("a GPU with half its lanes", "PL980", "GPU 7", "8 of 16 PCIe lanes",
          {0: Start(setup=gpus(8, lanes=8))}, count=1, words=(), others=("PL979",)),
    Fault("a port of InfiniBand that is down", "PL981", "", "mlx5_1 port 1 is DOWN",
          {0: Start(setup=infiniband(state="1: DOWN"))}, count=1, words=(), others=("PL973",)),
    Fault("InfiniBand that is switched off", "PL981", "", "NCCL_IB_DISABLE=1", {0: Start(
        setup=infiniband(), environ={"NCCL_IB_DISABLE": "1"})}, count=1, words=(), others=("PL973",)),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a case printed.

    Attributes:
        findings: of the first node, with their place and code.
        said: errors of all nodes.
        seconds: from the start to the end.
    """

    findings: list[dict[str, str]]
    said: str
    seconds: float


def run_case(fault: Fault, folder: Path) -> Outcome:
    """Run a case in a cluster of its own."""
    with Nodes(fault.count) as nodes:
        for node in range(fault.count):
            nodes.limit(node, RATE_MBIT)
        (folder / "train.py").write_text("print(1)\n")
        (folder / "runs").mkdir(exist_ok=True)
        with fault.plant(nodes), ExitStack() as stack:
            began_s = time.monotonic()
            running = [
                stack.enter_context(_start(fault, nodes, node, folder))
                for node in (fault.only if fault.count == 3 else range(fault.count))
                for _ in range(fault.starts.get(node, Start()).times)
            ]
            # A node that was stopped never ends by itself.
            printed = []
            for process in running:
                limit_s = _LIMIT_S if process is running[0] else 25.0
                try:
                    printed.append(process.communicate(timeout=limit_s))
                except subprocess.TimeoutExpired:
                    process.kill()
                    printed.append(process.communicate())
                if process is running[0]:
                    seconds = time.monotonic() - began_s
    table = json.loads(printed[0][0] or "{}")
    found = table.get("findings", []) + [{"where": "command", **each} for each in table.get("errors", [])]
    if "machine" in table:
        found = [each for row in table.get("checks", ()) for each in row["findings"]]
    said = " ".join(error.strip() for _, error in printed if "[PL" in error)
    if are_busy(table.get("speeds", {})):
        said += "speeds were not compared, as this machine was busy"
    return Outcome(found, said, seconds)


def _start(fault: Fault, nodes: Nodes, node: int, folder: Path) -> subprocess.Popen[str]:
    start = fault.starts.get(node, Start())
    own = Path(tempfile.mkdtemp(dir=folder, prefix=f"node{node}-"))
    words = [sys.executable, "-m", "paceline", "doctor", *fault.words]
    if fault.count > 1:
        endpoint = start.endpoint or f"{nodes.address(0)}:{PORT}"
        words += ["--nnodes", str(fault.count), "--rdzv-endpoint", endpoint, "--join-timeout", "15"]
    elif fault.name.startswith("the port"):
        words += ["--nnodes", "2", "--rdzv-endpoint", f"{nodes.address(0)}:{PORT}", "--join-timeout", "6"]
    words += [*start.words, *(["--json"] if node == 0 else [])]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HOME_DIR": str(own), "RUNS": str(folder / "runs")}
    if start.site:
        (own / "sitecustomize.py").write_text(start.site)
        environ["PYTHONPATH"] = f"{own}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    setup = f"hostname {start.host_name}; " if start.host_name else ""
    shell = ["sh", "-c", f'{setup}{start.setup}exec "$@"', "sh", *words]
    command = nodes.command(node, shell, own_name=start.own_name)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environ | start.environ, **pipes)


def judge(fault: Fault, outcome: Outcome, usual: set[tuple[str, str]]) -> tuple[str, list[str]]:
    """Return the finding that names the fault ("" if none does), and findings that are about something else."""
    named, wrong = "", []
    for found in outcome.findings:
        text = f"{found['where']}: {found['saw']}"
        is_code = re.fullmatch(fault.code, found["code"])
        if is_code and re.search(fault.where, text) and re.search(fault.saw, text):
            named = named or f"{text} [{found['code']}]"
        elif is_code and fault.where and re.search(fault.where, text):
            continue  # the same link or node again
        elif found["code"] not in fault.others and (found["code"], found["saw"]) not in usual:
            wrong.append(f"{text} [{found['code']}]")
    if not named:
        for code, line in re.findall(r"(?m)^()(.*\[PL\d+\].*)$", outcome.said):
            if re.search(rf"\[({fault.code})\]", code + line) and re.search(fault.saw, line):
                named = line
    return named, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name has it")
    parser.add_argument(
        "--healthy", type=int, nargs="*", default=[2, 3, 4, 5, 6], metavar="N", help="clusters of N"
    )
    args = parser.parse_args()
    if reason := why_no_nodes():
        print(f"not run: {reason}")
        return 2
    usual: set[tuple[str, str]] = set()
    rows, num_named, num_clean = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="paceline-tally-") as made:
        alone = run_case(Fault("one machine", "", "", "", count=1, words=()), _folder(made, "one"))
        usual |= {(found["code"], found["saw"]) for found in alone.findings}
        print(
            "this machine, without a fault:",
            *(f"{f['saw']} [{f['code']}]" for f in alone.findings),
            flush=True,
        )
        for size in args.healthy:
            case = Fault(
                f"healthy, {size} nodes", "none", "", "", count=size, words=(), only=tuple(range(size))
            )
            outcome = run_case(case, _folder(made, case.name))
            _, wrong = judge(case, outcome, usual)
            num_clean += not wrong
            rows.append(_row(case.name, "; ".join(wrong) or "nothing", not wrong, outcome.seconds))
        chosen = [f for f in FAULTS if not args.only or any(text in f.name for text in args.only)]
        for fault in chosen:
            outcome = run_case(fault, _folder(made, fault.name))
            named, wrong = judge(fault, outcome, usual)
            right = bool(named) and not wrong
            num_named += right
            said = named or f"not named; said: {outcome.said[:300]}"
            rows.append(
                _row(fault.name, said + "".join(f"; also: {w}" for w in wrong), right, outcome.seconds)
            )
    last = f"{num_named} of {len(chosen)} faults named right; {num_clean} of {len(args.healthy)} healthy clusters without a finding"
    print(last)
    if not args.only:
        head = (
            "<!-- Written by `python -m tests.doctor.tally`. -->\n\n| planted | said | s |\n|---|---|---|\n"
        )
        TABLE.write_text(f"{head}{''.join(rows)}\n{last}.\n", encoding="utf-8")
    return int(num_named < len(chosen) or num_clean < len(args.healthy))


def _folder(made: str, name: str) -> Path:
    folder = Path(made, re.sub(r"\W+", "-", name))
    folder.mkdir()
    return folder


def _row(name: str, said: str, right: bool, seconds: float) -> str:
    said = re.sub(r"/tmp/\S*paceline-tally-[^/ ]*", "...", said).replace("|", "\\|").replace("\n", " ")
    said = said.replace(sys.executable, "python")
    line = f"| {'' if right else 'NOT RIGHT: '}{name} | {said} | {seconds:.0f} |\n"
    print(line, end="", flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
