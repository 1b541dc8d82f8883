"""The port of the rendezvous: is it free.

A port that an old run holds makes the new one fail, or join the old one.
"""

from __future__ import annotations

import socket

import psutil

from paceline.doctor.machine import Checked, Machine

_DEFAULT = 29500


def check(machine: Machine) -> Checked:
    """Bind to the port, and name who holds it."""
    named = machine.environ.get("MASTER_PORT", "")
    port = machine.port or (int(named) if named.isdigit() else _DEFAULT)
    checked = Checked("port", "PL978", f"{port} is free")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        checked.said = f"{port} is taken"
        checked.find(
            f"port {port} cannot be used: {error.strerror}{_name_holder(port)}.",
            "The nodes of a job, or the ranks of a node, meet at a port.",
            "End what holds it, or name another one with --rdzv-endpoint HOST:PORT or --master-port.",
        )
    return checked


def _name_holder(port: int) -> str:
    try:
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port and entry.pid:
                return f", held by process {entry.pid} ({' '.join(psutil.Process(entry.pid).cmdline()[:3])})"
    except (psutil.Error, OSError, RuntimeError):
        pass
    return ""
