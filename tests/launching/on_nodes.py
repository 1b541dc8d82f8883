"""Runs a program as ranks on several nodes, which are network namespaces of this machine; needs root."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from tests.launching.nodes import Nodes
from tests.launching.wan import Wan

ROOT = Path(__file__).parents[2]
_LIMIT_S = 580


def run_on_nodes(
    places: tuple[int, ...], rate_mbit: float, words: list[str], round_trip_ms: float = 0
) -> str:
    """Run a program as one rank per place, and return what rank 0 prints."""
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(max(places) + 1))
        interface, address = "eth0", nodes.address(0)
        if round_trip_ms:
            names = [nodes.namespace(node) for node in range(max(places) + 1)]
            stack.enter_context(Wan(names, round_trip_ms / 2, rate_mbit))
            interface, address = "wan0", "10.78.0.10"
        elif rate_mbit:
            for node in range(max(places) + 1):
                nodes.limit(node, rate_mbit)
        # One shell per node starts its ranks.
        started = []
        for node in range(max(places) + 1):
            ranks = [rank for rank, at in enumerate(places) if at == node]
            script = ""
            for local, rank in enumerate(ranks):
                place = f"RANK={rank} LOCAL_RANK={local} LOCAL_WORLD_SIZE={len(ranks)}"
                script += f'{place} "$@" & '
            env = {
                **os.environ,
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            command = nodes.powered(nodes.command(node, ["sh", "-c", script + "wait", "sh", *words]))
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT))
            stack.callback(_end, started[-1])
        out, _ = started[0].communicate(timeout=_LIMIT_S)
        for process in started[1:]:
            process.communicate(timeout=60)
        return out


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
