"""Finds out which ranks are on one node."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from paceline.comm.one_tensor import gather_objects


def find_nodes() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes' host names, and each rank's node, numbered in the order of ranks; collective.

    Containers with networks of their own count as nodes of their own.
    """
    found = gather_objects(_identify_node())
    known = list(dict.fromkeys(found))
    return tuple(host for host, _, _ in known), tuple(map(known.index, found))


def read_boot() -> str:
    """Return what distinguishes this start of this machine; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _identify_node() -> tuple[str, str, int]:
    """Return host name, boot and network namespace."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return socket.gethostname(), read_boot(), network
