"""Nodes as network namespaces: each with an address, a host name and a hosts file of its own.

The nodes hang on one bridge, which lives in a namespace too, so the machine's own network is not touched and
all test processes may use the same addresses. The namespaces' names carry the process id.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

OwnName = Literal["address", "loopback", "nothing"]
_PROGRAMS = ("ip", "nsenter", "unshare", "mount")
_numbers = itertools.count()


def why_no_nodes() -> str | None:
    """Return the reason why namespaces cannot be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    name = f"paceline-probe-{os.getpid()}"
    made = _run("ip", "netns", "add", name)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    linked = _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    unshared = _run("unshare", "--uts", "--mount", "--pid", "--fork", "true")
    _run("ip", "netns", "del", name)
    if linked.returncode != 0:
        return f"no bridge can be made here: {linked.stderr.strip()}"
    if unshared.returncode != 0:
        return f"no namespaces for mounts, names and processes: {unshared.stderr.strip()}"
    return None


class Nodes:
    """So many nodes, from `__enter__` to `__exit__`; node i is called `node<i>`."""

    def __init__(self, count: int) -> None:
        self._name = f"pl{os.getpid()}-{next(_numbers)}"
        self._count = count
        self.switch = f"{self._name}-sw"
        self._folder = Path()

    def __enter__(self) -> Nodes:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-nodes-"))
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """Return a node's address, on its interface eth0."""
        return f"10.77.0.{10 + node}"

    def command(
        self, node: int, words: Sequence[str], *, own_name: OwnName = "address", own_host: bool = True
    ) -> list[str]:
        """Return the command that runs a program in a node, in place of the process that is started.

        Args:
            node: its number.
            words: the program and its arguments.
            own_name: what the node's own name stands for there: its address, 127.0.1.1, or nothing.
            own_host: whether it has a host name of its own; else this machine's, which stands for nothing.
        """
        # /sys stays as it is, unlike under `ip netns exec`.
        script = f"mount --bind {self._hosts(node, own_name)} /etc/hosts; "
        script += f"mount --bind {self._folder}/resolv.conf /etc/resolv.conf; "
        script += f'hostname node{node}; exec "$@"' if own_host else 'exec "$@"'
        unshare = ["unshare", "--mount", "--propagation", "private", *(["--uts"] if own_host else [])]
        return [
            "nsenter",
            f"--net=/run/netns/{self.namespace(node)}",
            *unshare,
            "sh",
            "-c",
            script,
            "sh",
            *words,
        ]

    def powered(self, words: Sequence[str]) -> list[str]:
        """Around `command`: a node whose processes all end with the one that is started."""
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *words]

    def cut(self, node: int) -> None:
        """Take a node's link down, without a word to its interface's user."""
        _do("ip", "-n", self.switch, "link", "set", f"p{node}", "down")

    def heal(self, node: int) -> None:
        """Undo `cut`."""
        _do("ip", "-n", self.switch, "link", "set", f"p{node}", "up")

    def split(self, nodes: Collection[int]) -> None:
        """Parts the network in two: these nodes reach each other, and the others do."""
        _do("ip", "-n", self.switch, "link", "add", "br1", "type", "bridge")
        _do("ip", "-n", self.switch, "link", "set", "br1", "up")
        for node in nodes:
            _do("ip", "-n", self.switch, "link", "set", f"p{node}", "master", "br1")

    def join(self) -> None:
        """Undo `split`."""
        for node in range(self._count):
            _do("ip", "-n", self.switch, "link", "set", f"p{node}", "master", "br0")
        _do("ip", "-n", self.switch, "link", "del", "br1")

    def mute(self, node: int) -> None:
        """Loses what a node sends to the others, and not what they send to it."""
        for other in range(self._count):
            if other != node:
                words = ["replace", self.address(other), "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
                _do("ip", "-n", self.namespace(node), "neigh", *words, "dev", "eth0")

    def unmute(self, node: int) -> None:
        """Undo `mute`."""
        for other in range(self._count):
            if other != node:
                words = ["del", self.address(other), "dev", "eth0"]
                _do("ip", "-n", self.namespace(node), "neigh", *words)

    def reset(self, node: int) -> None:
        """Reset all of a node's TCP connections to the others, as a router that forgets them does."""
        for other in self._others(node):
            _do("ip", "netns", "exec", self.namespace(node), "ss", "-K", "-t", "dst", other)

    def refuse(self, node: int) -> None:
        """Refuse what a node sends to the others, with an error; its answers to them are lost."""
        for other in self._others(node):
            _do("ip", "-n", self.namespace(node), "route", "add", "prohibit", other)

    def admit(self, node: int) -> None:
        """Undo `refuse`."""
        for other in self._others(node):
            _do("ip", "-n", self.namespace(node), "route", "del", "prohibit", other)

    def block(self, node: int, other: int, verdict: str) -> None:
        """Part two nodes from each other, by a verdict of nftables such as `drop`."""
        for at, source in ((node, other), (other, node)):
            rules = "add table ip parted; add chain ip parted in { type filter hook input priority 0; }; "
            # A reset is let in, so that both ends learn of it, as from a router between them.
            for rule in ("tcp flags & rst == rst accept", f"meta l4proto tcp {verdict}"):
                rules += f"add rule ip parted in ip saddr {self.address(source)} {rule}; "
            _do("ip", "netns", "exec", self.namespace(at), "nft", rules)

    def unblock(self, node: int, other: int) -> None:
        """Undo `block`."""
        for at in (node, other):
            _do("ip", "netns", "exec", self.namespace(at), "nft", "delete table ip parted")

    def _others(self, node: int) -> list[str]:
        return [self.address(other) for other in range(self._count) if other != node]

    def limit(self, node: int, rate_mbit: float) -> None:
        """Limits what a node sends and what it receives."""
        for namespace, device in ((self.namespace(node), "eth0"), (self.switch, f"p{node}")):
            # What may pass at once is 1 ms long; more would let small messages pass at no cost.
            burst = f"{max(2000, rate_mbit * 125):.0f}"
            rate = ("rate", f"{rate_mbit:g}mbit", "burst", burst, "latency", "100ms")
            _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self._name}-{node}"

    def _hosts(self, node: int, own_name: OwnName) -> Path:
        path = self._folder / f"hosts-{node}-{own_name}"
        lines = ["127.0.0.1 localhost"]
        for other in range(self._count):
            address = self.address(other)
            if other == node and own_name != "address":
                address = "127.0.1.1" if own_name == "loopback" else ""
            if address:
                lines.append(f"{address} node{other}")
        path.write_text("\n".join(lines) + "\n")
        return path

    def _build(self) -> None:
        (self._folder / "resolv.conf").write_text("")  # so that a name which is not known fails at once
        _do("ip", "netns", "add", self.switch)
        _do("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i in range(self._count):
            name = self.namespace(i)
            _do("ip", "netns", "add", name)
            veth = ("type", "veth", "peer", "name", f"p{i}", "netns", self.switch)
            _do("ip", "-n", self.switch, "link", "add", "eth0", "netns", name, *veth)
            _do("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", name, "link", "set", device, "up")
            _do("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0")
            _do("ip", "-n", self.switch, "link", "set", f"p{i}", "up")

    def _remove(self) -> None:
        for name in [*map(self.namespace, range(self._count)), self.switch]:
            _remove_namespace(name)
        shutil.rmtree(self._folder, ignore_errors=True)


def nodes_left() -> list[str]:
    """Return the namespaces of this process."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").stdout.splitlines() if line]
    return [name for name in names if name.startswith(f"pl{os.getpid()}-")]


def remove_all_nodes() -> None:
    """Remove the namespaces of this process, in a hurry."""
    for name in nodes_left():
        _remove_namespace(name)


def _remove_namespace(name: str) -> None:
    for pid in _run("ip", "netns", "pids", name).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", name)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)


def _do(*words: str) -> None:
    done = _run(*words)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
