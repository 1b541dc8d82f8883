"""This machine's name and the address behind it.

gloo and torch's store look up the own name to learn the own address. If it stands for nothing, the
rendezvous fails; if it stands for 127.0.1.1 (Debian's default), other nodes are sent to themselves.
"""

from __future__ import annotations

import socket
import time

import psutil

from paceline.doctor.machine import Checked, Machine
from paceline.doctor.meeting_check import is_loopback, look_up
from paceline.units import format_seconds

_RULE = "gloo and torch's store look up this name to learn the address that they give to the others."
_SLOW_S = 1.0


def check(machine: Machine) -> Checked:
    """Look the name up, and compare the answer with the machine's own addresses."""
    del machine
    name, started_s = socket.gethostname(), time.perf_counter()
    checked = Checked("name", "PL976", f"{name} stands for nothing")
    try:
        address = look_up(name)
    except (OSError, UnicodeError) as error:
        saw = f"{name} does not resolve ({error.strerror if isinstance(error, OSError) else error})."
        checked.find(saw, _RULE, f"Add a line to /etc/hosts: ADDRESS {name}.")
        return checked
    took_s = time.perf_counter() - started_s
    own = {entry.address.partition("%")[0] for group in psutil.net_if_addrs().values() for entry in group}
    checked.said = f"{name} is {address}"
    if address not in own and not is_loopback(address):
        checked.find(
            f"{name} stands for {address}, which is no address of this machine.",
            _RULE,
            f"Correct the line of {name} in /etc/hosts, or the name server.",
        )
    if took_s > _SLOW_S:
        checked.find(
            f"looking {name} up took {format_seconds(took_s)}.",
            _RULE,
            "Add the name to /etc/hosts, or put a name server that answers first in /etc/resolv.conf.",
        )
    return checked
